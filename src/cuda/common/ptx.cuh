// The instructions that C++ has no name for, and nothing else. Each states what it computes; where a GPU lacks one, the
// same bytes come from a sequence that it has.
//
//                            sm_90a          sm_100a, sm_103a
//     8 floats -> E2M1       a rounding by the adder, E4M3's conversion as the packer       cvt.rn.e2m1x2
//     the same, stochastic   a denormal's bits, and an integer addition                     cvt.rs.e2m1x4
//     FP8, stochastic        core/rounding.h                                                cvt.rs.e4m3x4, e5m2x4
//     amax -> E8M0           core/scaling.h's mx_scale_up                                   cvt.rp.ue8m0x2
#pragma once

#include <cstdint>

namespace minifloat::cuda {

// Two floats -> two FP8 codes, nearest even, saturating; `low` in bits 7:0. NaN gives the NaN code 0x7F.
__device__ __forceinline__ std::uint32_t cvt_e4m3x2(float low, float high) {
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
__device__ __forceinline__ std::uint32_t cvt_e5m2x2(float low, float high) {
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// Two floats -> two bf16, nearest even; `low` in bits 15:0. NaN gives 0x7FFF.
__device__ __forceinline__ std::uint32_t cvt_bf16x2(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two halves -> two floats, the lower half first.
__device__ __forceinline__ float2 cvt_f16x2(std::uint32_t pair) {
  float2 values;
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(pair));
  return values;
}
// The values of the FP8 codes in bits 7:0 and 15:8. Each is exact in the half between.
__device__ __forceinline__ float2 decode_e4m3x2(std::uint32_t codes) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<std::uint16_t>(codes)));
  return cvt_f16x2(pair);
}
__device__ __forceinline__ float2 decode_e5m2x2(std::uint32_t codes) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(static_cast<std::uint16_t>(codes)));
  return cvt_f16x2(pair);
}
// Of the E4M3 code in bits 7:0.
__device__ __forceinline__ float decode_e4m3(std::uint32_t code) { return decode_e4m3x2(code).x; }

// copysign(min(|x|, bound), x) for a bound that is positive.
__device__ __forceinline__ float clamp_magnitude(float x, float bound) {
  float r;
  asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(bound));
  return r;
}

// a * b towards zero, denormals kept.
__device__ __forceinline__ float multiply_toward_zero(float a, float b) {
  float r;
  asm("mul.rz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// 1 / x to nearest, for an x whose reciprocal is normal as it is: the instruction's approximation and one step of
// Newton's, which is what the compiler makes of a division once it has ruled out the ends of the range.
__device__ __forceinline__ float reciprocal_of_normal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return fmaf(r, fmaf(-x, r, 1.0f), r);
}

// mask ? a : b, bit by bit.
__device__ __forceinline__ std::uint32_t select_bits(std::uint32_t mask, std::uint32_t a,
                                                     std::uint32_t b) {
  std::uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}

// Four bytes of (low, high), byte i by nibble i of the selector: bits 2:0 name one of the eight; with bit 3 set, its
// sign fills the result's byte. (__byte_perm ignores bit 3.)
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high,
                                                       std::uint32_t selector) {
  std::uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
  return r;
}

// The larger magnitude of each half, as bf16 pairs whose signs mean nothing; NaN stays.
__device__ __forceinline__ std::uint32_t max_magnitude_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// 16 bytes of shared memory from global memory, both aligned: the first `bytes` of them, then zeros. They are there once
// the thread has waited.
__device__ __forceinline__ void copy_async_16(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Waits for every thread of the cluster; memory that it wrote before is seen by all behind. A launch without clusters
// is one of one block each.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
#define MINIFLOAT_HAS_BLACKWELL_CONVERSIONS 1

// Eight floats -> eight E2M1 codes, element 0 in the lowest nibble. NaN gives +6.   Not yet run on hardware.
__device__ __forceinline__ std::uint32_t cvt_e2m1x8(const float* v) {
  std::uint32_t r;
  asm("{\n.reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n}"
      : "=r"(r)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return r;
}
// Four floats and a random word -> four codes.   Not yet run on hardware.
__device__ __forceinline__ std::uint32_t cvt_rs_e2m1x4(const float* v, std::uint32_t word) {
  std::uint16_t r;
  asm("cvt.rs.satfinite.e2m1x4.f32 %0, {%4, %3, %2, %1}, %5;"
      : "=h"(r)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(word));
  return r;
}
// Four floats and a random word -> four FP8 codes, element 0 in the lowest byte: bits 15:0 of the word serve element 0,
// the same reversed element 1, bits 31:16 so elements 2 and 3 (core/philox.h). NaN gives a NaN, and PTX does not say
// which one.   Not yet run on hardware.
__device__ __forceinline__ std::uint32_t cvt_rs_e4m3x4(const float* v, std::uint32_t word) {
  std::uint32_t r;
  asm("cvt.rs.satfinite.e4m3x4.f32 %0, {%4, %3, %2, %1}, %5;"
      : "=r"(r)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(word));
  return r;
}
__device__ __forceinline__ std::uint32_t cvt_rs_e5m2x4(const float* v, std::uint32_t word) {
  std::uint32_t r;
  asm("cvt.rs.satfinite.e5m2x4.f32 %0, {%4, %3, %2, %1}, %5;"
      : "=r"(r)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(word));
  return r;
}
// x >= 0 -> the E8M0 code of the power of two at or above it: 0 up to 2^-127, 254 past 2^126.   Not yet run on hardware.
__device__ __forceinline__ std::uint32_t cvt_up_ue8m0(float x) {
  std::uint16_t codes;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(x));
  return codes;
}
#endif

}  // namespace minifloat::cuda

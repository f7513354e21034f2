// The instructions that C++ has no name for, and what replaces them where a GPU lacks one: other
// instructions, with the same bytes. Each function's comment states the result.
//
//                                    80  86  89  90a 100a 103a 120f   elsewhere
//   larger magnitudes (xorsign)      -   x   x   x   x    x    x      max of magnitudes
//   FP8 <-> float                    -   -   x   x   x    x    x      core/rounding.h
//   product of two bf16 pairs        -   -   -   x   x    x    x      fma with -0
//   barrier of a cluster             -   -   -   x   x    x    x      other kernels
//   E2M1, nearest; E8M0, up          -   -   -   -   x    x    x      encode.cuh; core/scaling.h
//   E2M1 and FP8, stochastic         -   -   -   -   x    x    -      codec/encode.cuh
//
// A target's number is a compute capability; "a" and "f" add instructions that the plain number
// lacks. Code for 80 also runs on 8.6, code for 120f on 12.1, and drivers compile PTX of 80 for all
// other GPUs. tests/tools/test_targets.py compares each target's code with this table.
#pragma once

#include <cstdint>

#include "minifloat/core/rounding.h"

#if __CUDA_ARCH__ >= 860
#define MINIFLOAT_HAS_XORSIGN 1
#endif
#if __CUDA_ARCH__ >= 890
#define MINIFLOAT_HAS_FP8_CONVERSIONS 1
#endif
#if __CUDA_ARCH__ >= 900
#define MINIFLOAT_HAS_BF16_PRODUCTS 1
#define MINIFLOAT_HAS_CLUSTERS 1
#endif
// Defined by "a" and "f" targets alone. Hopper's "a" has neither.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH__ >= 1000
#define MINIFLOAT_HAS_FP4_CONVERSIONS 1
#endif
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
#define MINIFLOAT_HAS_STOCHASTIC_CONVERSIONS 1
#endif

namespace minifloat::cuda {

// Convert two floats to two FP8 codes, nearest even, saturating; `low` in bits 7:0. NaN gives the
// NaN code 0x7F.
__device__ __forceinline__ std::uint32_t cvt_e4m3x2(float low, float high) {
#if defined(MINIFLOAT_HAS_FP8_CONVERSIONS)
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  return encode<E4M3>(low) | encode<E4M3>(high) << 8;
#endif
}
__device__ __forceinline__ std::uint32_t cvt_e5m2x2(float low, float high) {
#if defined(MINIFLOAT_HAS_FP8_CONVERSIONS)
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  return encode<E5M2>(low) | encode<E5M2>(high) << 8;
#endif
}

// Converts two floats to two bf16, nearest even; `low` in bits 15:0. NaN gives 0x7FFF.
__device__ __forceinline__ std::uint32_t cvt_bf16x2(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Converts two halves to two floats, the lower half first.
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
// Return the values of the FP8 codes in bits 7:0 and 15:8. Each is exact in the half in between.
__device__ __forceinline__ float2 decode_e4m3x2(std::uint32_t codes) {
#if defined(MINIFLOAT_HAS_FP8_CONVERSIONS)
  std::uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<std::uint16_t>(codes)));
  return cvt_f16x2(pair);
#else
  return {decode<E4M3>(codes), decode<E4M3>(codes >> 8)};
#endif
}
__device__ __forceinline__ float2 decode_e5m2x2(std::uint32_t codes) {
#if defined(MINIFLOAT_HAS_FP8_CONVERSIONS)
  std::uint32_t pair;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(static_cast<std::uint16_t>(codes)));
  return cvt_f16x2(pair);
#else
  return {decode<E5M2>(codes), decode<E5M2>(codes >> 8)};
#endif
}
// Returns the value of the E4M3 code in bits 7:0.
__device__ __forceinline__ float decode_e4m3(std::uint32_t code) { return decode_e4m3x2(code).x; }

// Returns copysign(min(|x|, bound), x) for a positive bound.
__device__ __forceinline__ float clamp_magnitude(float x, float bound) {
#if defined(MINIFLOAT_HAS_XORSIGN)
  float r;
  asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(bound));
  return r;
#else
  return copysignf(fminf(fabsf(x), bound), x);
#endif
}

// Returns a * b rounded towards zero, denormals kept.
__device__ __forceinline__ float multiply_toward_zero(float a, float b) {
  float r;
  asm("mul.rz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// Computes a * b + c, rounded once, towards zero.
__device__ __forceinline__ float fma_toward_zero(float a, float b, float c) {
  float r;
  asm("fma.rz.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}

// Returns 1 / x to nearest, for an x whose reciprocal is normal: the instruction's approximation
// and one step of Newton's method. The compiler makes the same of a division that excludes the ends
// of the range.
__device__ __forceinline__ float reciprocal_of_normal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return fmaf(r, fmaf(-x, r, 1.0f), r);
}

// Returns mask ? a : b, bit by bit.
__device__ __forceinline__ std::uint32_t select_bits(std::uint32_t mask, std::uint32_t a,
                                                     std::uint32_t b) {
  std::uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}

// Returns four bytes of (low, high), byte i by nibble i of the selector. Bits 2:0 name one of the
// eight bytes; with bit 3 set, that byte's sign fills the result's byte. (__byte_perm ignores bit
// 3.)
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high,
                                                       std::uint32_t selector) {
  std::uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
  return r;
}

// Multiplies two pairs of bf16, nearest even.
__device__ __forceinline__ std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
#if defined(MINIFLOAT_HAS_BF16_PRODUCTS)
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
  constexpr std::uint32_t kMinusZeros = 0x8000'8000u;  // a product's own sign of zero stays
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(kMinusZeros));
#endif
  return r;
}

// Returns the larger number of each half, as bf16 pairs.
__device__ __forceinline__ std::uint32_t max_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Returns the larger magnitude of each half, as bf16 pairs whose signs are undefined; NaN stays.
__device__ __forceinline__ std::uint32_t max_magnitude_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
#if defined(MINIFLOAT_HAS_XORSIGN)
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
  constexpr std::uint32_t kMagnitudes = 0x7FFF'7FFFu;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a & kMagnitudes), "r"(b & kMagnitudes));
#endif
  return r;
}

// Copies 16 bytes from global to shared memory, both aligned: the first `bytes` of them, then
// zeros. The bytes are in place after the thread has waited.
__device__ __forceinline__ void copy_async_16(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Hides where a value comes from. What is computed from it in a loop then stays there; before the
// loop it would take registers.
__device__ __forceinline__ void hide_origin(std::uint32_t& value) {
  asm volatile("" : "+r"(value));
}

// Loads four matrices of 8 x 8 elements of 16 bits from shared memory, transposed.   row: lane
// 8 j + i passes row i of matrix j, 16 bytes   out: (4), a matrix each: lane 4 c + l has column c's
// elements 2 l and 2 l + 1, the first in the lower half
__device__ __forceinline__ void load_transposed_8x8(const void* row, std::uint32_t* out) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Waits for every thread of the cluster. Memory written before is visible to all threads after. A
// launch without clusters has clusters of one block. Code without clusters is never launched
// (one_cluster.cu asks first), and would stop.
__device__ __forceinline__ void sync_cluster() {
#if defined(MINIFLOAT_HAS_CLUSTERS)
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#else
  __trap();
#endif
}

#if defined(MINIFLOAT_HAS_FP4_CONVERSIONS)
// Converts eight floats to eight E2M1 codes, element 0 in the lowest nibble. NaN gives +6.   Not
// yet run on hardware.
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
// Returns the E8M0 code of the power of two at or above x >= 0: 0 up to 2^-127, 254 past 2^126.
// Not yet run on hardware.
__device__ __forceinline__ std::uint32_t cvt_up_ue8m0(float x) {
  std::uint16_t codes;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(x));
  return codes;
}
#endif

#if defined(MINIFLOAT_HAS_STOCHASTIC_CONVERSIONS)
// Converts four floats by a random word to four codes.   Not yet run on hardware.
__device__ __forceinline__ std::uint32_t cvt_rs_e2m1x4(const float* v, std::uint32_t word) {
  std::uint16_t r;
  asm("cvt.rs.satfinite.e2m1x4.f32 %0, {%4, %3, %2, %1}, %5;"
      : "=h"(r)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(word));
  return r;
}
// Convert four floats by a random word to four FP8 codes, element 0 in the lowest byte. Bits 15:0
// of the word serve element 0, and reversed element 1; bits 31:16 serve elements 2 and 3 in this
// way (core/philox.h). NaN gives a NaN, and PTX does not define which one.   Not yet run on
// hardware.
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
#endif

}  // namespace minifloat::cuda

// The macros of core/ that depend on the compiler, a constexpr cast of bits, and the fused
// multiply-add. nvcc compiles each function for host and device, a C++ compiler for the host alone.
// Functions are always inlined, so that a loop compiled for a wider vector unit contains their
// bodies.
#pragma once

#if defined(__CUDACC__)
#define MINIFLOAT_HD __host__ __device__ __forceinline__
#else
#define MINIFLOAT_HD [[gnu::always_inline]] inline
#endif

// The mark of a loop over an array that a GPU keeps in registers.
#if defined(__CUDA_ARCH__)
#define MINIFLOAT_UNROLL _Pragma("unroll")
#else
#define MINIFLOAT_UNROLL
#endif

namespace minifloat {

template <class To, class From>
MINIFLOAT_HD constexpr To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// a * b + c, rounded once.
MINIFLOAT_HD float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

}  // namespace minifloat

// One loop, compiled for several vector units. The widest one of the machine is chosen at run time.
//
// A kernel is a struct with `static void run(const Args&)`, marked MINIFLOAT_INLINE like all
// functions that it calls, so that the whole body is compiled again inside each of the three
// functions below. Arithmetic is IEEE everywhere and nothing is contracted, so the results are the
// same bytes.
#pragma once

#define MINIFLOAT_INLINE [[gnu::always_inline]] inline

namespace minifloat::cpu {

#if defined(__x86_64__)
#if defined(__clang__)
#define MINIFLOAT_TARGET_AVX512 [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,fma")]]
#else  // g++ prefers 256 bits by default
#define MINIFLOAT_TARGET_AVX512 \
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,fma,prefer-vector-width=512")]]
#endif
#define MINIFLOAT_TARGET_AVX2 [[gnu::target("avx2,bmi2,fma")]]

template <class Kernel, class Args>
MINIFLOAT_TARGET_AVX512 auto run_avx512(const Args& args) {
  return Kernel::run(args);
}
template <class Kernel, class Args>
MINIFLOAT_TARGET_AVX2 auto run_avx2(const Args& args) {
  return Kernel::run(args);
}
#endif

template <class Kernel, class Args>
auto run_baseline(const Args& args) {
  return Kernel::run(args);
}

enum class VectorUnit { kBaseline, kAvx2, kAvx512 };

inline VectorUnit vector_unit() {
#if defined(__x86_64__)
  static const VectorUnit unit = [] {
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      return VectorUnit::kAvx512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? VectorUnit::kAvx2
                                                                           : VectorUnit::kBaseline;
  }();
  return unit;
#else
  return VectorUnit::kBaseline;
#endif
}

template <class Kernel, class Args>
auto run_widest(const Args& args) {
#if defined(__x86_64__)
  if (vector_unit() == VectorUnit::kAvx512) return run_avx512<Kernel>(args);
  if (vector_unit() == VectorUnit::kAvx2) return run_avx2<Kernel>(args);
#endif
  return run_baseline<Kernel>(args);
}

}  // namespace minifloat::cpu

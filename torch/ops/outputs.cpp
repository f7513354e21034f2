#include "ops/outputs.h"

#include <ATen/ATen.h>

#include "ops/direct.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace minifloat::torch_ops {

using at::Tensor;

void advise_huge_pages(const Tensor& output) {
#if defined(__linux__)
  constexpr std::uintptr_t kHugePage = 2 << 20;
  const auto begin = reinterpret_cast<std::uintptr_t>(output.data_ptr());
  const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage,
                       end = (begin + output.nbytes()) / kHugePage * kHugePage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

Tensor empty(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType dtype) {
  if (like.is_meta()) return at::empty_symint(shape, like.options().dtype(dtype));
  Tensor output = direct_empty(like, C10_AS_INTARRAYREF_SLOW(shape), dtype);
  if (like.is_cpu()) advise_huge_pages(output);
  return output;
}

Tensor or_empty(const Tensor* t, const Tensor& like) {
  return t && t->defined() ? *t : at::empty({0}, like.options().dtype(at::kFloat));
}

at::ScalarType scale_dtype(const Spec& spec) {
  return spec.scale_type() == ScaleType::kFloat32 ? at::kFloat : at::kByte;
}

bool is_scale_dtype(at::ScalarType dtype, const Spec& spec) {
  if (dtype == scale_dtype(spec)) return true;
  switch (spec.scale_type()) {
    case ScaleType::kE8m0: return dtype == at::kFloat8_e8m0fnu;
    case ScaleType::kE4m3: return dtype == at::kFloat8_e4m3fn;
    case ScaleType::kNone:
    case ScaleType::kFloat32: break;
  }
  return false;
}

}  // namespace minifloat::torch_ops

// The op norm_operands, which quantizes the result of a normalisation before the products that read
// it.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "layers/computed_operands.h"
#include "ops/norm.h"

namespace minifloat {
namespace {

using at::Tensor;
using namespace torch_ops;
using MaybeTensor = std::optional<Tensor>;

// Returns the eight tensors.
std::vector<Tensor> norm_operands_kernel(const Tensor& x, const MaybeTensor& weight,
                                         const MaybeTensor& bias, const std::string& kind,
                                         double eps, const std::string& recipe, bool rowwise,
                                         bool columnwise, const MaybeTensor& rng,
                                         const MaybeTensor& amax_history, std::int64_t stream) {
  const NormArguments a = {"norm_operands", x, weight, bias, kind, eps};
  check_norm(a);
  ModuleState state;
  if (rng) state.rng = *rng;
  if (amax_history) state.history = *amax_history;
  state.stream = stream;
  state.cast = [&](const std::string& r, const std::string& c, const QuantizeOptions& options) {
    return quantize_norm(a, r, c, options);
  };
  return operands_of_computed(a.op, prepare(recipe), as_matrix(a.op, "x", x), rowwise, columnwise,
                              state);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  m.impl("norm_operands", norm_operands_kernel);
}

}  // namespace minifloat

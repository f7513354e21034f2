// The ops norm_operands and add_norm_operands, which quantize the result of a normalisation before
// the products that read it.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "layers/computed_operands.h"
#include "ops/norm.h"

namespace minifloat {
namespace {

using at::Tensor;
using namespace torch_ops;
using MaybeTensor = std::optional<Tensor>;

// Returns the eight tensors; with a residual after the sum.
std::vector<Tensor> operands_of_norm(const NormArguments& a, const std::string& recipe,
                                     bool rowwise, bool columnwise, const MaybeTensor& rng,
                                     const MaybeTensor& amax_history, std::int64_t stream) {
  check_norm(a);
  Tensor sum;
  ModuleState state;
  if (rng) state.rng = *rng;
  if (amax_history) state.history = *amax_history;
  state.stream = stream;
  state.cast = [&](const std::string& r, const std::string& c, const QuantizeOptions& options) {
    QuantizedNorm out = quantize_norm(a, r, c, options);
    sum = out.sum;
    return Directions{out.row, out.col};
  };
  const Tensor like = as_matrix(a.op, "x", a.x);
  std::vector<Tensor> list =
      operands_of_computed(a.op, prepare(recipe), like, rowwise, columnwise, state);
  if (!a.residual) return list;
  if (!sum.defined()) sum = a.x + *a.residual;  // no direction was cast
  list.insert(list.begin(), sum);
  return list;
}

std::vector<Tensor> norm_operands_kernel(const Tensor& x, const MaybeTensor& weight,
                                         const MaybeTensor& bias, const std::string& kind,
                                         double eps, const std::string& recipe, bool rowwise,
                                         bool columnwise, const MaybeTensor& rng,
                                         const MaybeTensor& amax_history, std::int64_t stream) {
  return operands_of_norm({"norm_operands", x, weight, bias, kind, eps}, recipe, rowwise,
                          columnwise, rng, amax_history, stream);
}

std::vector<Tensor> add_norm_operands_kernel(const Tensor& x, const Tensor& residual,
                                             const MaybeTensor& weight, const MaybeTensor& bias,
                                             const std::string& kind, double eps,
                                             const std::string& recipe, bool rowwise,
                                             bool columnwise, const MaybeTensor& rng,
                                             const MaybeTensor& amax_history, std::int64_t stream) {
  const NormArguments a = {"add_norm_operands", x, weight, bias, kind, eps, &residual};
  check_norm(a);
  return with_history_of_sum(x, residual, [&] {
    return operands_of_norm(a, recipe, rowwise, columnwise, rng, amax_history, stream);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  m.impl("norm_operands", norm_operands_kernel);
  m.impl("add_norm_operands", add_norm_operands_kernel);
}

}  // namespace minifloat

// The ops quantize_activation, quantize_swiglu and quantize_activation_backward: casts of an
// activation's results, which need not be in a GPU's memory.
#include <ATen/ATen.h>

#include <tuple>
#include <vector>

#include "minifloat/experts.h"
#include "ops/activation.h"
#include "ops/activation_inputs.h"
#include "ops/direct.h"
#include "ops/kernels.h"
#include "ops/op.h"

namespace minifloat {
namespace {

using at::Tensor;
using torch_ops::ActivationArguments;
using torch_ops::ActivationInputs;
using torch_ops::CastOfComputed;
using torch_ops::check_activation;
using torch_ops::check_unread;
using torch_ops::Directions;
using torch_ops::EightTensors;
using torch_ops::GradientCasts;
using torch_ops::inputs_of;
using torch_ops::QuantizedGradients;
using torch_ops::QuantizedOperand;
using torch_ops::QuantizeOptions;
using MaybeTensor = std::optional<Tensor>;

// ---- h ------------------------------------------------------------------------------------------
Directions cast_h(const ActivationArguments& a, const std::string& row, const std::string& col,
                  const QuantizeOptions& options, bool shares_memory) {
  check_activation(a, nullptr, true);
  if (a.gate.is_meta())
    return torch_ops::direct_quantize(a.like_h(), row, col, options, nullptr, shares_memory);
  const ActivationInputs in = inputs_of(a);
  const CastOfComputed cast = [&](const Operand* to_row, const Operand* to_col,
                                  const GroupTable& groups, const Execution& execution) {
    SwiGlu of = in.of;
    of.groups = groups;
    quantize_swiglu(of, to_row, to_col, execution);
  };
  const Tensor like_h = a.is_joint() ? in.gate.narrow(1, 0, in.of.width) : in.gate;
  return torch_ops::direct_quantize(like_h, row, col, options, &cast, shares_memory);
}

EightTensors quantize_activation_kernel(const Tensor& gate, const MaybeTensor& up,
                                        const std::string& activation, const std::string& row,
                                        const std::string& col, const MaybeTensor& amax_row,
                                        const MaybeTensor& amax_col, const MaybeTensor& rng,
                                        std::int64_t stream_row, std::int64_t stream_col,
                                        c10::SymIntArrayRef origin, bool decoded_row,
                                        bool decoded_col, bool fp8_row, bool fp8_col,
                                        bool swizzled_row, bool swizzled_col) {
  constexpr const char* kOp = "quantize_activation";
  QuantizeOptions options = torch_ops::options_of(kOp, amax_row, amax_col, rng, stream_row,
                                                  stream_col, origin, decoded_row, decoded_col);
  options.fp8_row = fp8_row, options.fp8_col = fp8_col;
  options.swizzled_row = swizzled_row, options.swizzled_col = swizzled_col;
  const ActivationArguments a = {.op = kOp, .gate = gate, .up = up, .activation = activation};
  return torch_ops::eight_tensors(cast_h(a, row, col, options, false));
}

EightTensors quantize_swiglu_kernel(
    const Tensor& product, const MaybeTensor& other, const Tensor& weights, const std::string& row,
    const std::string& col, std::optional<double> limit, double alpha, bool interleaved,
    const MaybeTensor& pairs, const MaybeTensor& groups, std::int64_t unit,
    const MaybeTensor& amax_row, const MaybeTensor& amax_col, const MaybeTensor& rng,
    std::int64_t stream_row, std::int64_t stream_col, const MaybeTensor& row_ids,
    std::int64_t first_expert, bool decoded_row, bool decoded_col, bool amaxes_of_columns) {
  const ActivationArguments a = {"quantize_swiglu", product, other, &weights, limit, alpha,
                                 interleaved,       pairs,   groups};
  const QuantizeOptions options = {.amax_row = amax_row,
                                   .amax_col = amax_col,
                                   .rng = rng,
                                   .stream_row = stream_row,
                                   .stream_col = stream_col,
                                   .decoded_row = decoded_row,
                                   .decoded_col = decoded_col,
                                   .amaxes_of_columns = amaxes_of_columns,
                                   .groups = {groups, unit},
                                   .row_ids = row_ids,
                                   .first_expert = first_expert};
  return torch_ops::eight_tensors(cast_h(a, row, col, options, false));
}

// ---- Gradients ----------------------------------------------------------------------------------
constexpr const char* kBackward = "quantize_activation_backward";

// Casts the gradients of gate and up, and h. Each matrix's call allocates its outputs, then makes
// the next one's call; the last has the operands of all, and quantizes.
class BackwardCast {
 public:
  BackwardCast(const ActivationInputs& in, const GradientCasts& casts, bool shares_memory)
      : in_(in), casts_(casts), shares_memory_(shares_memory) {}

  QuantizedGradients run() {
    gate_ = [this](const Operand* row, const Operand* col, const GroupTable&,
                   const Execution& execution) {
      to_.gate_row = row, to_.gate_col = col;
      in_.up.defined() ? cast_up() : cast_h_and_quantize(execution);
    };
    out_.gate = direct_quantize(casts_.row, casts_.col, casts_.gate, gate_);
    return out_;
  }

 private:
  Directions direct_quantize(const std::string& row, const std::string& col,
                             const QuantizeOptions& options, const CastOfComputed& cast) const {
    return torch_ops::direct_quantize(in_.gate, row, col, options, &cast, shares_memory_);
  }
  void cast_up() {
    const CastOfComputed cast = [this](const Operand* row, const Operand* col, const GroupTable&,
                                       const Execution& execution) {
      to_.up_row = row, to_.up_col = col;
      cast_h_and_quantize(execution);
    };
    out_.up = direct_quantize(casts_.row, casts_.col, casts_.up, cast);
  }
  void cast_h_and_quantize(const Execution& execution) {
    if (casts_.h_col.empty()) return quantize(execution);
    const CastOfComputed cast = [this](const Operand*, const Operand* col, const GroupTable&,
                                       const Execution& of_h) {
      to_.h_col = col;
      quantize(of_h);
    };
    out_.h = direct_quantize("", casts_.h_col, casts_.h, cast).second;
  }
  void quantize(const Execution& execution) const {
    quantize_swiglu_backward(in_.of, in_.dh.const_data_ptr(), in_.dh.stride(0), to_, execution);
  }

  const ActivationInputs& in_;
  const GradientCasts& casts_;
  bool shares_memory_;
  CastOfComputed gate_;
  SwiGluCasts to_ = {};
  QuantizedGradients out_ = {};
};

void check_gradients(const Tensor& dh, const ActivationArguments& a, const GradientCasts& casts) {
  check_activation(a, &dh, true);
  if (!a.up) check_unread(a.op, casts.up, dh);
  if (casts.h_col.empty()) check_unread(a.op, casts.h, dh);
}

QuantizedGradients cast_gradients(const Tensor& dh, const ActivationArguments& a,
                                  const GradientCasts& casts, bool shares_memory) {
  check_gradients(dh, a, casts);
  const ActivationInputs in = inputs_of(a, &dh);
  return BackwardCast(in, casts, shares_memory).run();
}

QuantizedGradients meta_gradients(const Tensor& dh, const ActivationArguments& a,
                                  const GradientCasts& casts) {
  check_gradients(dh, a, casts);
  QuantizedGradients out;
  out.gate = torch_ops::quantize(a.gate, casts.row, casts.col, casts.gate);
  if (a.up) out.up = torch_ops::quantize(a.gate, casts.row, casts.col, casts.up);
  if (!casts.h_col.empty()) out.h = torch_ops::quantize(a.gate, "", casts.h_col, casts.h).second;
  return out;
}

// What a cast writes, which the op takes once for both gradients.
auto forms_of(auto& o) {
  return std::tie(o.decoded_row, o.decoded_col, o.fp8_row, o.fp8_col, o.swizzled_row,
                  o.swizzled_col);
}

std::vector<Tensor> quantize_activation_backward_kernel(
    const Tensor& dh, const Tensor& gate, const MaybeTensor& up, const std::string& activation,
    const std::string& row, const std::string& col, const std::string& h_col,
    const MaybeTensor& gate_amax_row, const MaybeTensor& gate_amax_col,
    const MaybeTensor& up_amax_row, const MaybeTensor& up_amax_col, const MaybeTensor& h_amax,
    const MaybeTensor& gate_rng, const MaybeTensor& up_rng, const MaybeTensor& h_rng,
    std::int64_t gate_stream_row, std::int64_t gate_stream_col, std::int64_t up_stream_row,
    std::int64_t up_stream_col, std::int64_t h_stream, bool decoded_row, bool decoded_col,
    bool decoded_h, bool fp8_row, bool fp8_col, bool fp8_h, bool swizzled_row, bool swizzled_col,
    bool swizzled_h) {
  QuantizeOptions of_gate = {.amax_row = gate_amax_row,
                             .amax_col = gate_amax_col,
                             .rng = gate_rng,
                             .stream_row = gate_stream_row,
                             .stream_col = gate_stream_col};
  QuantizeOptions of_up = {.amax_row = up_amax_row,
                           .amax_col = up_amax_col,
                           .rng = up_rng,
                           .stream_row = up_stream_row,
                           .stream_col = up_stream_col};
  forms_of(of_gate) = forms_of(of_up) =
      std::tie(decoded_row, decoded_col, fp8_row, fp8_col, swizzled_row, swizzled_col);
  const QuantizeOptions of_h = {.amax_row = {},
                                .amax_col = h_amax,
                                .rng = h_rng,
                                .stream_col = h_stream,
                                .decoded_col = decoded_h,
                                .fp8_col = fp8_h,
                                .swizzled_col = swizzled_h};
  TORCH_CHECK_VALUE(!fp8_h || !h_col.empty(), kBackward,
                    ": expected a spec of h, whose FP8 codes are asked for");
  TORCH_CHECK_VALUE(!swizzled_h || !h_col.empty(), kBackward,
                    ": expected a spec of h, whose swizzled scales are asked for");
  const ActivationArguments a = {.op = kBackward, .gate = gate, .up = up, .activation = activation};
  const GradientCasts casts = {row, col, h_col, of_gate, of_up, of_h};
  const QuantizedGradients out =
      dh.is_meta() ? meta_gradients(dh, a, casts) : cast_gradients(dh, a, casts, false);
  std::vector<Tensor> list;
  const auto append = [&](const QuantizedOperand& o) {
    list.insert(list.end(), {o.codes, o.scale, o.amax, o.decoded});
  };
  append(out.gate.first), append(out.gate.second);
  if (up) append(out.up.first), append(out.up.second);
  if (!h_col.empty()) append(out.h);
  return list;
}

const torch_ops::Op quantize_activation_op("quantize_activation", quantize_activation_kernel,
                                           torch_ops::without_derivative());
const torch_ops::Op quantize_swiglu_op("quantize_swiglu", quantize_swiglu_kernel,
                                       torch_ops::without_derivative());
const torch_ops::Op quantize_activation_backward_op(kBackward, quantize_activation_backward_kernel,
                                                    torch_ops::without_derivative());

QuantizedOperand four_at(const std::vector<Tensor>& list, std::size_t at) {
  return {list[at], list[at + 1], list[at + 2], list[at + 3]};
}

}  // namespace

namespace torch_ops {

Directions quantize_activation(const ActivationArguments& of, const std::string& row,
                               const std::string& col, const QuantizeOptions& options) {
  if (can_skip_dispatcher({&of.gate, or_null(of.up), of.weights, or_null(of.pairs),
                           or_null(of.groups), or_null(options.amax_row), or_null(options.amax_col),
                           or_null(options.rng), or_null(options.row_ids)}))
    return cast_h(of, row, col, options, true);
  if (of.weights)
    return both_of(quantize_swiglu_op(
        of.gate, of.up, *of.weights, row, col, of.limit, of.alpha, of.interleaved, of.pairs,
        options.groups.table, options.groups.unit, options.amax_row, options.amax_col, options.rng,
        options.stream_row, options.stream_col, options.row_ids, options.first_expert,
        options.decoded_row, options.decoded_col, options.amaxes_of_columns));
  return both_of(quantize_activation_op(of.gate, of.up, of.activation, row, col, options.amax_row,
                                        options.amax_col, options.rng, options.stream_row,
                                        options.stream_col, options.origin, options.decoded_row,
                                        options.decoded_col, options.fp8_row, options.fp8_col,
                                        options.swizzled_row, options.swizzled_col));
}

QuantizedGradients quantize_activation_backward(const Tensor& dh, const ActivationArguments& of,
                                                const GradientCasts& casts) {
  const QuantizeOptions &gate = casts.gate, &up = casts.up, &h = casts.h;
  if (can_skip_dispatcher({&dh, &of.gate, or_null(of.up), or_null(gate.amax_row),
                           or_null(gate.amax_col), or_null(up.amax_row), or_null(up.amax_col),
                           or_null(h.amax_col), or_null(gate.rng), or_null(up.rng),
                           or_null(h.rng)}))
    return cast_gradients(dh, of, casts, true);
  TORCH_CHECK_VALUE(!of.up || forms_of(gate) == forms_of(up), kBackward,
                    ": expected the same forms of both gradients' operands");
  const std::vector<Tensor> list = quantize_activation_backward_op(
      dh, of.gate, of.up, of.activation, casts.row, casts.col, casts.h_col, gate.amax_row,
      gate.amax_col, up.amax_row, up.amax_col, h.amax_col, gate.rng, up.rng, h.rng, gate.stream_row,
      gate.stream_col, up.stream_row, up.stream_col, h.stream_col, gate.decoded_row,
      gate.decoded_col, h.decoded_col, gate.fp8_row, gate.fp8_col, h.fp8_col, gate.swizzled_row,
      gate.swizzled_col, h.swizzled_col);
  QuantizedGradients out;
  out.gate = {four_at(list, 0), four_at(list, 4)};
  if (of.up) out.up = {four_at(list, 8), four_at(list, 12)};
  if (!casts.h_col.empty()) out.h = four_at(list, list.size() - 4);
  return out;
}

}  // namespace torch_ops

}  // namespace minifloat

// The backward pass of an MLP, and the casts of h.
#include "layers/mlp.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <utility>

#include "layers/mlp_ops.h"

namespace minifloat::torch_ops {
namespace {

bool is_bf16(const PreparedRecipe& prepared, const OperandUse& operand) {
  return operand.is_needed && prepared.reads_values(operand.place);
}

// A gradient as both products read it.
struct CastGradient {
  Tensor values;  // undefined: not written
  Directions operands;
};

struct GradientsOfGates {
  std::vector<CastGradient> gates;  // of gate, and of up
  QuantizedOperand h;               // columnwise
};

class Backward {
 public:
  Backward(const MlpLayers& layers, const std::vector<Tensor>& saved, const Tensor& dy)
      : r_(layers),
        prepared_(layers.inputs.recipe),
        inputs_(saved.begin(), saved.begin() + 3 * (1 + layers.count())),
        output_(saved.begin() + inputs_.size(), saved.begin() + inputs_.size() + 6),
        device_(dy.device()),
        dy_(as_matrix(kMlp, "gradient", dy)),
        tokens_(dy_.sym_size(0)) {
    gates_.gate = saved[inputs_.size() + 6];
    const Tensor& up = saved[inputs_.size() + 7];
    if (up.defined()) gates_.up = up;
    row_decoded_ = layers.inputs.dgrad(device_).reads_values();
    col_decoded_ = layers.inputs.wgrad(device_).reads_values();
  }

  // Each operand is freed with the product that reads it.
  std::vector<Tensor> gradients() const {
    const std::size_t n = r_.count();
    const std::size_t biases = r_.inputs.bias_dtypes.size();
    std::vector<Tensor> out(1 + n + 1 + biases + r_.output.bias_dtypes.size());
    const bool needs_dh = r_.needs.output.dx, needs_dw = r_.needs.output.any_dw;
    const OperandUse row{kDgradG, needs_dh, row_decoded_}, col{kWgradG, needs_dw, col_decoded_};
    Directions dy = quantize_both(prepared_, dy_, row, col, r_.output.state_of_rows(0));
    Tensor dh;
    if (needs_dh)
      dh = input_gradient(r_.output, dy.first, row, saved_weight(r_.output, output_, 0),
                          dy_.sym_size(1), r_.output.x_dtype, device_);
    dy.first = {};
    GradientsOfGates d = gradients_of_gates(std::move(dh));
    if (needs_dw)
      out[1 + n] =
          weight_gradient(r_.output, 0, dy.second, col, h_input(d.h), tokens_, device_, 1 + n);
    dy = {};
    d.h = {};
    if (!r_.needs.output.db.empty() && r_.needs.output.db[0])
      out.back() = bias_gradient(r_.output, 0, dy_);
    if (!needs_dh) return out;
    ProductInput x = saved_input(r_.inputs, inputs_, 0, kWgradX);
    for (std::size_t i = 0; i < n; ++i) add_layer(i, std::move(d.gates[i]), x, out);
    return out;
  }

 private:
  OperandUse gate_row() const { return {kDgradG, r_.needs.inputs.dx, row_decoded_}; }
  OperandUse gate_col() const { return {kWgradG, r_.needs.inputs.any_dw, col_decoded_}; }
  // Whether backward casts h, which forward did not save.
  OperandUse h_col() const {
    return {.place = kWgradX,
            .is_needed = r_.needs.output.any_dw && !saves_h(prepared_),
            .decoded = col_decoded_,
            .recomputed = true};
  }

  // Adds the gradients of one of the weights that read x.
  void add_layer(std::size_t i, CastGradient g, ProductInput& x, std::vector<Tensor>& out) const {
    const std::size_t n = r_.count();
    if (r_.needs.inputs.dx) {
      const Tensor dx = input_gradient(r_.inputs, g.operands.first, gate_row(),
                                       saved_weight(r_.inputs, inputs_, i), gates_.gate.sym_size(1),
                                       r_.inputs.x_dtype, device_);
      out[0] = out[0].defined() ? out[0] + dx : dx;
    }
    g.operands.first = {};
    if (r_.needs.inputs.dw[i]) {
      if (n > 1)
        x = prepare_input(r_.inputs.wgrad(device_), prepared_.recipe.wgrad.b, std::move(x),
                          tokens_);
      out[1 + i] =
          weight_gradient(r_.inputs, i, g.operands.second, gate_col(), x, tokens_, device_, 1 + i);
    }
    const int bias = r_.inputs.bias_index[i];
    if (bias >= 0 && r_.needs.inputs.db[static_cast<std::size_t>(bias)])
      out[2 + n + static_cast<std::size_t>(bias)] = bias_gradient(r_.inputs, bias, g.values);
  }

  ProductInput h_input(const QuantizedOperand& h) const {
    if (saves_h(prepared_)) return saved_input(r_.output, output_, 0, kWgradX);
    return product_input(prepared_, h, h_col());
  }

  // Casts the gradients of gate and up, and h, from one read of dh, gate and up.
  GradientsOfGates gradients_of_gates(Tensor dh) const {
    if (dh.defined() && scales_by_whole_tensors()) return from_values_and_amaxes(std::move(dh));
    const bool needs_values = is_bf16(prepared_, gate_row()) || is_bf16(prepared_, gate_col()) ||
                              is_bf16(prepared_, h_col()) || has_biases();
    const bool casts_gates = gate_row().is_needed || gate_col().is_needed;
    if (needs_values || !casts_gates) return from_values(dh);
    const CastPlan of_gate = plan_cast(prepared_, gates_.gate, gate_row(), gate_col(),
                                       r_.inputs.state_of_rows(0)),
                   of_up = plan_cast(prepared_, gates_.gate, gate_row(), gate_col(),
                                     r_.inputs.state_of_rows(gates_.up ? 1 : 0)),
                   of_h = plan_cast(prepared_, gates_.gate, {kFpropX, false}, h_col(),
                                    r_.output.state_of_rows(0));
    QuantizedGradients d = quantize_activation_backward(
        dh, gates_.of(r_.activation),
        {of_gate.row, of_gate.col, of_h.col, of_gate.options, of_up.options, of_h.options});
    GradientsOfGates out = {{{Tensor(), std::move(d.gate)}}, std::move(d.h)};
    if (gates_.up) out.gates.push_back({Tensor(), std::move(d.up)});
    for (std::size_t i = 0; i < out.gates.size(); ++i)
      raise_histories(prepared_, gate_row(), gate_col(), r_.inputs.state_of_rows(i),
                      out.gates[i].operands, false);
    return out;
  }

  // Returns whether a cast of gate's and up's gradients scales by the amax of a whole tensor, which
  // is known once all values are.
  bool scales_by_whole_tensors() const {
    const auto is_of_tensor = [&](const OperandUse& needed) {
      const Spec& spec = prepared_.specs[needed.place];
      return !needed.is_needed ||
             (spec.rule == ScaleRule::kTensor && !spec.delayed && spec.transform == 0);
    };
    return (gate_row().is_needed || gate_col().is_needed) && is_of_tensor(gate_row()) &&
           is_of_tensor(gate_col()) && !is_bf16(prepared_, h_col());
  }

  // Writes the values, finds their amaxes and casts h in one pass over dh, gate and up, then casts
  // the values by those amaxes. d_gate is written over dh, which nothing else reads.
  GradientsOfGates from_values_and_amaxes(Tensor dh) const {
    CastContext state_of_h = r_.output.state_of_rows(0);
    if (const Tensor& amax = output_[2]; h_col().is_needed && amax.defined())
      state_of_h.amax = amax;
    const CastPlan of_h = plan_cast(prepared_, gates_.gate, {kFpropX, false}, h_col(), state_of_h);
    GradientValues d = activation_gradients_(dh, gates_.of(r_.activation), of_h.col, of_h.options);
    GradientsOfGates out = {{}, std::move(d.h)};
    std::array<Tensor, 2> values = {std::move(dh), std::move(d.up)};
    const bool reads_values = has_biases();
    for (std::size_t i = 0; i < r_.count(); ++i) {
      const CastPlan plan =
          plan_cast(prepared_, values[i], gate_row(), gate_col(), r_.inputs.state_of_rows(i));
      QuantizeOptions options = plan.options;
      const Tensor amax = d.amaxes.select(0, static_cast<std::int64_t>(i));
      if (!plan.row.empty()) options.amax_row = amax;
      if (!plan.col.empty()) options.amax_col = amax;
      Directions operands = quantize(values[i], plan.row, plan.col, options);
      out.gates.push_back({reads_values ? values[i] : Tensor(), std::move(operands)});
      values[i].reset();
    }
    return out;
  }

  // Returns whether a bias needs its gradient, a sum of values.
  bool has_biases() const {
    const auto& db = r_.needs.inputs.db;
    return std::find(db.begin(), db.end(), true) != db.end();
  }

  // The same by way of the values, where something else reads them.
  GradientsOfGates from_values(const Tensor& dh) const {
    GradientsOfGates out;
    if (h_col().is_needed)
      out.h = quantize_h(prepared_, gates_, r_.activation, {kFpropX, false}, h_col(),
                         r_.output.state_of_rows(0))
                  .second;
    if (!dh.defined()) return out;
    const ActivationGradients found = activation_backward(dh, gates_.of(r_.activation));
    const std::array<Tensor, 2> d = {found.gate, found.up};
    for (std::size_t i = 0; i < r_.count(); ++i)
      out.gates.push_back({d[i], quantize_both(prepared_, d[i], gate_row(), gate_col(),
                                               r_.inputs.state_of_rows(i))});
    return out;
  }

  const MlpLayers& r_;
  const PreparedRecipe& prepared_;
  const std::vector<Tensor> inputs_, output_;  // the saved tensors of each
  Gates gates_;
  at::Device device_;
  Tensor dy_;
  SymInt tokens_;
  bool row_decoded_ = false, col_decoded_ = false;
};

}  // namespace

Directions quantize_h(const PreparedRecipe& prepared, const Gates& gates,
                      const std::string& activation, const OperandUse& row, const OperandUse& col,
                      CastContext state) {
  if (is_bf16(prepared, row) || is_bf16(prepared, col))
    return quantize_both(prepared, torch_ops::activation(gates.of(activation)), row, col, state);
  state.cast = [&](const std::string& r, const std::string& c, const QuantizeOptions& options) {
    QuantizeOptions own = options;
    own.amaxes_of_columns = false;  // which this kernel does not find
    return quantize_activation(gates.of(activation), r, c, own);
  };
  return quantize_both(prepared, gates.gate, row, col, state);
}

bool saves_h(const PreparedRecipe& prepared) {
  const Spec &row = prepared.specs[kFpropX], &col = prepared.specs[kWgradX];
  if (prepared.keeps_codes(kFpropX)) return true;
  return col.delayed && (!row.delayed || row.transform > 0 || col.transform > 0);
}

std::vector<Tensor> mlp_gradients(const MlpLayers& layers, const std::vector<Tensor>& saved,
                                  const Tensor& dy) {
  return Backward(layers, saved, dy).gradients();
}

MlpState::MlpState(const Tensor& x, const Mlp& mlp, const PreparedRecipe& recipe,
                   const MlpNeeds& needed)
    : LayerState(kMlp, recipe),
      layers{{mlp.inputs, recipe, x.scalar_type()},
             {mlp.output, recipe, x.scalar_type()},
             mlp.activation,
             needed},
      x_shape(x.sym_sizes().vec()) {
  for (const Layers* of : {&mlp.inputs, &mlp.output}) {
    add_rng(of->rng);
    add_histories(of->histories);
  }
}

std::vector<Tensor> MlpState::gradients(const std::vector<Tensor>& saved,
                                        const std::vector<Tensor>& grads) const {
  if (!grads[0].defined())
    return std::vector<Tensor>(2 + layers.count() + layers.inputs.bias_dtypes.size() +
                               layers.output.bias_dtypes.size());
  std::vector<Tensor> out = records_mlp_gradients(layers, grads)
                                ? record_mlp_gradients(layers, saved, grads[0])
                                : mlp_gradients(layers, saved, grads[0]);
  if (out[0].defined() && x_shape.size() != 2) out[0] = out[0].view_symint(x_shape);
  return out;
}

}  // namespace minifloat::torch_ops

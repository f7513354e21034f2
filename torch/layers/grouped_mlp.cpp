// The op grouped_mlp, the products of a mixture's experts, from tokens to tokens:
//
//     rows = x[token of each row]                       row_ids decide the random bits
//     gate, up = rows · w1ᵀ, rows · w3ᵀ                 one product where one matrix has both
//     h = SwiGLU(gate, up) · routing weight
//     y[token] = base + Σ over slots of h · w2ᵀ         in fp32, in the slots' order
//
// It is differentiable as a whole. Saved: x, once for all slots (or the codes that arrived of its
// rows), gate and up, the routing weights, the order, the matrices, and the amaxes that both
// directions of an operand share. Backward (expert_passes.cpp) reads the rows of x again, computes
// h again, and quantizes both columnwise.
//
// A trace, and ranks that cut the matrices along I, record the differentiable ops instead, whose
// products save operands. Each rank then computes a term of y; x, the weights and their gradients
// are whole on each.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <utility>

#include "layers/double_backward.h"
#include "layers/grouped_mlp.h"
#include "layers/layer_state.h"
#include "ops/bridge.h"
#include "ops/experts.h"
#include "ops/op.h"

namespace minifloat {
namespace {

using namespace torch_ops;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;
using MaybeTensors = c10::List<std::optional<Tensor>>;

// ---- Values on one process ----------------------------------------------------------------------
// Returns the tensors with biases as autocast rounds them, which products then add.
ExpertTensors with_rounded_biases(ExpertTensors t) {
  if (is_autocast(t.x))
    for (Tensor& bias : t.biases) bias = to_dtype(bias, t.x.scalar_type());
  return t;
}

Tensor forward_pass(const Experts& experts, const ExpertTensors& t, const MaybeTensor& base,
                    const ExpertNeeds* needs, ExpertResults& found) {
  const Tensor rows = forward_rows(experts, with_rounded_biases(t), needs, found);
  return experts.sums ? add_slots(rows, t.order.places, base) : rows;
}

// Returns what backward reads: the tensors of the call and the results, in the order in which
// GroupedMlpState::gradients takes them.
variable_list tensors_to_save(const ExpertTensors& t, const ExpertResults& found) {
  variable_list saved = {t.x,          t.weights,      t.order.pairs, t.order.places,
                         t.order.offs, t.order.row_ids};
  for (const variable_list* list :
       {&t.matrices, &t.biases, &t.codes, &found.products, &found.amaxes.matrices})
    saved.insert(saved.end(), list->begin(), list->end());
  saved.insert(saved.end(), {found.amaxes.rows, found.amaxes.hidden});
  return saved;
}

// What backward reads besides tensors, and the backward pass.
struct GroupedMlpState : LayerState {
  GroupedMlpState(const Experts& of, ExpertNeeds needed, std::size_t tensors_of_codes, bool base)
      : LayerState(kGroupedMlp, *of.products.back().recipe),
        experts(of),
        needs(std::move(needed)),
        codes(tensors_of_codes),
        has_base(base) {
    for (const ExpertProduct& product : experts.products) {
      add_rng(product.rng);
      add_histories(product.history);
      add_weight_operands(product.weight_operands);
    }
  }

  // Returns the gradients of x, weights, matrices, biases and the base, where there is one.
  variable_list gradients(const variable_list& saved, const variable_list& grads) const override {
    const std::size_t count = needs.matrices.size(), biases = needs.biases.size();
    auto next = saved.begin() + 6;
    const auto take = [&](std::size_t n) {
      const auto begin = next;
      next += static_cast<std::ptrdiff_t>(n);
      return variable_list(begin, next);
    };
    const ExpertTensors t = {saved[0],    saved[1],     {saved[2], saved[3], saved[4], saved[5]},
                             take(count), take(biases), take(codes)};
    ExpertResults found = {take(count - 1), {{}, {}, take(count)}};
    found.amaxes.rows = next[0];
    found.amaxes.hidden = next[1];
    const at::AutoGradMode no_grad(false);
    if (!grads[0].defined()) return variable_list(2 + count + biases + (has_base ? 1 : 0));
    ExpertGradients d = backward_rows(experts, t, found, grads[0], needs);
    variable_list out = {std::move(d.x), std::move(d.weights)};
    for (const variable_list* list : {&d.matrices, &d.biases})
      out.insert(out.end(), list->begin(), list->end());
    if (has_base) out.push_back(needs.base ? to_dtype(grads[0], at::kFloat) : Tensor());
    return out;
  }

  Experts experts;
  ExpertNeeds needs;
  std::size_t codes;  // tensors of x's codes
  bool has_base;
};

// ---- Differentiable ops -------------------------------------------------------------------------
// A tensor that is whole on each rank; its gradient is the sum of the ranks' gradients.
struct CopyToRanks : torch::autograd::Function<CopyToRanks> {
  static Tensor forward(AutogradContext* ctx, const Tensor& t, const std::string& group,
                        const std::string& recipe) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["recipe"] = recipe;
    return t.view_as(t);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out(3);
    out[0] = sum_of_ranks(ctx->saved_data["group"].toStringRef(), grads[0]);
    if (!at::GradMode::is_enabled()) return out;
    const auto node = torch::autograd::get_current_node();
    return refuse_double_backward(kGroupedMlp, ctx->saved_data["recipe"].toStringRef(), *node,
                                  grads, std::move(out));
  }
};

// The sum of the ranks' tensors, on each rank.
struct SumOverRanks : torch::autograd::Function<SumOverRanks> {
  static Tensor forward(AutogradContext*, const Tensor& t, const std::string& group) {
    return sum_of_ranks(group, t);
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], Tensor()};
  }
};

// A term of a sum over ranks: itself on the first rank, zeros on the others. Its gradient is that
// of the sum, on each rank.
struct TermOfFirstRank : torch::autograd::Function<TermOfFirstRank> {
  static Tensor forward(AutogradContext*, const Tensor& t, bool is_first) {
    return is_first ? t.view_as(t) : at::zeros_like(t);
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], Tensor()};
  }
};

// Computes y as differentiable ops.
Tensor compose(const Experts& experts, const ExpertTensors& t, const MaybeTensor& base) {
  const at::ScalarType dtype = t.x.scalar_type();
  const bool rounds = is_autocast(t.x);
  const Tensor table = t.order.table();
  const auto multiply = [&](const Tensor& a, std::size_t i) {
    const ExpertProduct& product = experts.products[i];
    const bool is_cast = rounds && product.weight_operands.empty();
    const int index = i < experts.inputs() ? experts.bias_index[i] : -1;
    variable_list bias;
    if (index >= 0) bias = {t.biases[static_cast<std::size_t>(index)]};
    if (rounds)
      for (Tensor& b : bias) b = to_dtype(b, dtype);
    return multiply_groups(a, is_cast ? to_dtype(t.matrices[i], dtype) : t.matrices[i],
                           t.order.offs, product_call(product, dtype, t.order, table, bias));
  };
  const Tensor rows = t.order.take(t.x);
  variable_list products;
  for (std::size_t i = 0; i < experts.inputs(); ++i) products.push_back(multiply(rows, i));
  const GateAndUp gates(products, t.weights, t.order, table);
  const Tensor y = multiply(activation(gates.of(experts.form)), experts.inputs());
  return experts.sums ? add_slots(y, t.order.places, base, t.order.pairs) : y;
}

// ---- The op -------------------------------------------------------------------------------------
// The arguments of products, as the op takes them.
struct ProductArguments {
  const std::vector<std::string>&recipes, &recompute;
  const std::optional<MaybeTensors>&rng, &histories;
  at::IntArrayRef streams;
  at::TensorList weight_operands;
  std::int64_t first_expert;
  std::optional<Sharding> sharding;
};

void check_count(const char* name, std::size_t count, std::size_t expected) {
  TORCH_CHECK_VALUE(count == expected, kGroupedMlp, ": expected ", expected, " ", name, ", got ",
                    count);
}

std::vector<ExpertProduct> products_of(const ProductArguments& a, std::size_t n) {
  check_count("recipes", a.recipes.size(), n);
  check_count("recompute", a.recompute.size(), n);
  check_count("streams", a.streams.size(), n);
  if (a.rng) check_count("rng", a.rng->size(), n);
  if (a.histories) check_count("amax_history", a.histories->size(), n);
  if (!a.weight_operands.empty())
    check_count("tensors of weight_operands", a.weight_operands.size(), 8 * n);
  const auto tensors = [](const std::optional<MaybeTensors>& list, std::size_t i) {
    const MaybeTensor t = list ? list->get(i) : std::nullopt;
    return t ? variable_list{*t} : variable_list();
  };
  std::vector<ExpertProduct> out;
  for (std::size_t i = 0; i < n; ++i) {
    const bool is_output = i + 1 == n;
    ExpertProduct product = {.recipe = &prepare(a.recipes[i]),
                             .stream = a.streams[i],
                             .first_expert = a.first_expert,
                             .rng = tensors(a.rng, i),
                             .history = tensors(a.histories, i),
                             .weight_operands = {},
                             .recomputes_weights = recomputes_weights(kGroupedMlp, a.recompute[i]),
                             .sharding = a.sharding};
    if (!a.weight_operands.empty()) {
      const at::TensorList operands = a.weight_operands.slice(8 * i, 8);
      for (const Tensor& t : operands)
        if (t.sym_numel() != 0) product.weight_operands = operands.vec();
    }
    if (product.sharding) {
      product.sharding->weight_dim = is_output ? 1 : 0;
      product.sharding->parts = n == 2 && !is_output ? 2 : 1;
    }
    out.push_back(std::move(product));
  }
  return out;
}

void check_tensors(const ExpertTensors& t) {
  for (const auto& [name, tensor, dims] :
       {std::tuple{"x", &t.x, 2}, std::tuple{"pairs", &t.order.pairs, 1},
        std::tuple{"places", &t.order.places, 2}, std::tuple{"offs", &t.order.offs, 1},
        std::tuple{"row_ids", &t.order.row_ids, 1}})
    TORCH_CHECK_VALUE(tensor->dim() == dims, kGroupedMlp, ": expected ", name, " of ", dims,
                      dims == 1 ? " dimension" : " dimensions", ", got ", tensor->dim());
  TORCH_CHECK_VALUE(t.order.pairs.scalar_type() == at::kInt, kGroupedMlp,
                    ": expected pairs as int32, got ", t.order.pairs.scalar_type());
  TORCH_CHECK_VALUE(at::isFloatingType(t.weights.scalar_type()), kGroupedMlp,
                    ": expected weights as floating-point numbers, got ", t.weights.scalar_type());
  for (const auto& [name, tensor] :
       {std::pair{"x", &t.x}, std::pair{"weights", &t.weights}, std::pair{"pairs", &t.order.pairs},
        std::pair{"places", &t.order.places}, std::pair{"offs", &t.order.offs}})
    bridge::check_memory_if_real(kGroupedMlp, name, *tensor);
  check_no_tangent(kGroupedMlp, "x", t.x);
  check_no_tangent(kGroupedMlp, "weights", t.weights);
  for (const Tensor& b : t.matrices) check_no_tangent(kGroupedMlp, "matrix", b);
  for (const Tensor& b : t.biases) {
    bridge::check_memory_if_real(kGroupedMlp, "bias", b);
    check_no_tangent(kGroupedMlp, "bias", b);
  }
}

// Requires what is checked when a product or the sum is computed, by which time an earlier product
// has written: the histories of all, the random states that casts need, and the base.
void check_products(const std::vector<ExpertProduct>& products, const ExpertTensors& t,
                    const MaybeTensor& base) {
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Tensor& b = t.matrices[i];
    TORCH_CHECK_VALUE(b.dim() == 3, kGroupedMlp, ": expected matrices (E, K, N), got ",
                      b.sym_sizes());
    check_states(products[i].rng, products[i].history, t.x, b.sym_size(0));
  }
  if (!base) return;
  const std::array<SymInt, 2> sums = {t.order.places.sym_size(0), t.matrices.back().sym_size(2)};
  torch_ops::check_base(kGroupedMlp, *base, sums, t.x.device());
  bridge::check_memory_if_real(kGroupedMlp, "base", *base);
}

ExpertNeeds needs_of(const ExpertTensors& t, const MaybeTensor& base) {
  const bool on = at::GradMode::is_enabled();
  ExpertNeeds needs = {on && t.x.requires_grad(),
                       on && t.weights.requires_grad(),
                       on && base && base->requires_grad(),
                       {},
                       {}};
  for (const Tensor& b : t.matrices) needs.matrices.push_back(on && b.requires_grad());
  for (const Tensor& b : t.biases) needs.biases.push_back(on && b.requires_grad());
  return needs;
}

Tensor grouped_mlp_kernel(const Tensor& x, const Tensor& weights, at::TensorList order,
                          at::TensorList matrices, const MaybeTensors& biases,
                          const std::vector<std::string>& recipes, const MaybeTensor& base,
                          bool sums, std::optional<double> limit, double alpha, bool interleaved,
                          const std::optional<MaybeTensors>& rng, std::int64_t first_expert,
                          const std::optional<MaybeTensors>& amax_history, at::IntArrayRef streams,
                          const std::optional<at::TensorList>& x_operands,
                          const std::optional<at::TensorList>& weight_operands,
                          const std::vector<std::string>& recompute, const std::string& group,
                          std::int64_t rank, std::int64_t ranks,
                          const std::optional<at::TensorList>& x_codes,
                          const std::optional<c10::intrusive_ptr<GradientCodes>>& gradient) {
  const std::size_t n = matrices.size();
  TORCH_CHECK_VALUE(n == 2 || n == 3, kGroupedMlp,
                    ": expected 2 matrices (gate and up, output) or 3 (gate, up, output), got ", n);
  check_count("tensors of order", order.size(), 4);
  check_count("biases", biases.size(), n - 1);
  if (x_operands) check_count("tensors of x_operands", x_operands->size(), 8);
  TORCH_CHECK_VALUE(sums || !base, kGroupedMlp, ": expected base of sums alone");
  Experts experts = {.products = {},
                     .form = {limit, alpha, interleaved},
                     .bias_index = {},
                     .sums = sums,
                     .gradient = {}};
  ExpertTensors t = {x, weights, {order[0], order[1], order[2], order[3]}, matrices.vec(), {}};
  for (const MaybeTensor& bias : biases) {
    experts.bias_index.push_back(bias ? static_cast<int>(t.biases.size()) : -1);
    if (bias) t.biases.push_back(*bias);
  }
  check_tensors(t);
  check_form(kGroupedMlp, limit, alpha, interleaved, n == 3);
  if (is_autocast(x)) autocast_dtype(x.device().type());  // raises for one that products lack
  const bool are_rows = !sums && group.empty() && bridge::is_real(x);
  TORCH_CHECK_VALUE(are_rows || !(x_codes || gradient), kGroupedMlp,
                    ": expected x_codes and gradient of rows, which are not summed");
  ProductArguments arguments = {recipes,      recompute, rng,
                                amax_history, streams,   weight_operands.value_or(at::TensorList()),
                                first_expert, {}};
  if (!group.empty()) {
    Sharding& sharding = arguments.sharding.emplace();
    sharding.group = group;
    sharding.rank = rank;
    sharding.ranks = ranks;
    check_sharding(kGroupedMlp, sharding, x);
  }
  experts.products = products_of(arguments, n);
  check_products(experts.products, t, base);
  if (gradient) experts.gradient = *gradient;
  if (x_codes) {
    const QuantizedOperand rows =
        sort_codes(experts.products[0].recipe->specs[kFpropX], *x_codes, t.order);
    t.codes = {rows.codes, rows.scale, rows.amax};
  }
  if (!group.empty()) {
    const std::string& recipe = experts.products.back().recipe->text;
    t.x = CopyToRanks::apply(x, group, recipe);
    t.weights = CopyToRanks::apply(weights, group, recipe);
    MaybeTensor term;
    if (base) term = TermOfFirstRank::apply(*base, rank == 0);
    return SumOverRanks::apply(compose(experts, t, term), group);
  }
  if (!bridge::is_real(x)) return compose(experts, t, base);
  // No codes of the matrices are saved: backward reads weight_operands where the caller gave some,
  // else it casts each matrix when a product reads it.
  for (ExpertProduct& product : experts.products) product.recomputes_weights = false;
  if (x_operands) t.tokens = x_operands->vec();
  const ExpertNeeds needs = needs_of(t, base);
  if (!needs.any()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ExpertResults found;
    return forward_pass(experts, t, base, nullptr, found);
  }
  const auto forward = [&]() -> ForwardResult {
    ExpertResults found;
    Tensor y = forward_pass(experts, t, base, &needs, found);
    return {{std::move(y)},
            tensors_to_save(t, found),
            c10::make_intrusive<GroupedMlpState>(experts, needs, t.codes.size(), base.has_value())};
  };
  return differentiate(joined({x, weights, t.matrices, t.biases, list_of(base)}), forward).front();
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  register_gradient_codes();
  m.impl("grouped_mlp", grouped_mlp_kernel);
}

}  // namespace minifloat

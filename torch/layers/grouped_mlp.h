// The products of a mixture's experts: their arguments, and both passes; grouped_mlp.cpp
// differentiates them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "layers/expert_rows.h"
#include "layers/grouped_call.h"
#include "ops/activation.h"
#include "ops/direct.h"

namespace minifloat::torch_ops {

inline constexpr const char* kGroupedMlp = "grouped_mlp";

// The recipe and the state of one product. All tensors of lists are defined.
struct ExpertProduct {
  const PreparedRecipe* recipe;
  std::int64_t stream, first_expert;
  std::vector<Tensor> rng, history;     // one tensor, or none
  std::vector<Tensor> weight_operands;  // eight tensors, or none: the product casts its matrices
  bool recomputes_weights;              // in a trace, and where ranks cut the matrices
  std::optional<Sharding> sharding;
};

// The form of SwiGLU; see core/swiglu.h.
struct SwiGluForm {
  std::optional<double> limit;
  double alpha;
  bool interleaved;
};

// What a call has besides the tensors of ExpertTensors. The context holds it for backward.
struct Experts {
  std::vector<ExpertProduct> products;  // of gate and up, or of both as one; then of the output
  SwiGluForm form;
  std::vector<int> bias_index;  // of the bias of gate and up among the call's biases; -1: none
  bool sums;                    // whether the rows of each token are summed
  c10::intrusive_ptr<GradientCodes> gradient;  // null: the gradient of the result has values

  std::size_t inputs() const { return products.size() - 1; }
};

// The tensors of a call that backward reads again.
struct ExpertTensors {
  Tensor x, weights;  // (T, D); the routing weights (T, k)
  RowOrder order;
  std::vector<Tensor> matrices;  // B (E, K, N), one a product
  std::vector<Tensor> biases;    // (E, N), those that there are
  // The codes, scale and amax of the sorted rows, where x has their shape alone; or none.
  std::vector<Tensor> codes = {};
  std::vector<Tensor> tokens = {};  // the operands of x that a caller gives, for forward alone
};

// The amaxes that forward finds and backward's casts take; undefined where those find their own.
struct ExpertAmaxes {
  Tensor rows;                   // of x's rows, which both directions share: (E)
  Tensor hidden;                 // of h: (E), or of its columns, (E, H)
  std::vector<Tensor> matrices;  // one a product: (E), or of W's columns, (E, K)
};

// Which gradients backward computes.
struct ExpertNeeds {
  bool x, weights, base;
  std::vector<bool> matrices, biases;

  bool any() const;
  // Returns whether the gradient of h is needed, which all that is computed before h needs.
  bool hidden() const;
};

// Gradients; undefined where one is not needed.
struct ExpertGradients {
  Tensor x, weights;
  std::vector<Tensor> matrices, biases;
};

// What backward reads besides the tensors of the call.
struct ExpertResults {
  std::vector<Tensor> products;  // of gate and up
  ExpertAmaxes amaxes;
};

// Returns the rows (M, D) of all experts, and what backward reads.   needs: of backward; null: none
Tensor forward_rows(const Experts& experts, const ExpertTensors& t, const ExpertNeeds* needs,
                    ExpertResults& found);

// Returns the gradients from what forward_rows found.
//   g: of the rows (M, D), or (T, D) of their sums
ExpertGradients backward_rows(const Experts& experts, const ExpertTensors& t,
                              const ExpertResults& found, const Tensor& g,
                              const ExpertNeeds& needs);

// Gate and up, as the ops of SwiGLU take them.
class GateAndUp {
 public:
  GateAndUp(const std::vector<Tensor>& products, const Tensor& weights, const RowOrder& order,
            const Tensor& table)
      : product_(products[0]),
        other_(products.size() > 1 ? std::optional(products[1]) : std::nullopt),
        weights_(to_dtype(weights, at::kFloat)),
        pairs_(order.pairs),
        groups_(table) {}
  // Returns arguments that refer to this object.
  ActivationArguments of(const SwiGluForm& form) const {
    return {"swiglu",   product_,         other_, &weights_, form.limit,
            form.alpha, form.interleaved, pairs_, groups_};
  }

 private:
  Tensor product_;
  std::optional<Tensor> other_;
  Tensor weights_;
  std::optional<Tensor> pairs_, groups_;
};

// Returns the arguments of one product, whose tensors must outlive them.   table: order's
GroupedCall product_call(const ExpertProduct& product, at::ScalarType dtype, const RowOrder& order,
                         const Tensor& table, at::TensorList bias = {},
                         at::TensorList a_operands = {}, bool zeroes_tail = true);

}  // namespace minifloat::torch_ops

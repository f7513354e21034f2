// The C++ API for libtorch programs.
//
//     #include <minifloat/torch.h>
//     auto y = minifloat::linear(x, weight, /*bias=*/{}, minifloat::Recipe::parse("mxfp8"));
//
//     struct Net : torch::nn::Module {
//       minifloat::nn::Linear up = register_module(
//           "up", minifloat::nn::Linear(256, 1024, minifloat::Recipe::parse("nvfp4")));
//       torch::Tensor forward(const torch::Tensor& x) { return up(x); }
//     };
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>

#include "minifloat/recipe.h"

namespace minifloat {

// The state that a recipe may require besides the operands, on x's device.
struct LinearState {
  // +sr, +eden, also where no gradient is computed and only backward's operands have them: int64
  // (2) or (3): seed, forward count and, if any, the module's stream, as nn::Linear's FNV-1a-64 of
  // its name. Layers of one seed and count and without a stream draw the same bits. The backward
  // pass reads the tensor of the forward pass again, so it must not be written to in between.
  std::optional<at::Tensor> rng;
  // +delayed: fp32 (6, 1 + length), one row an operand: fprop x, w; dgrad g, w; wgrad g, x. Column
  // 0 is the active amax; column 1 is this step's current amax, written in place; older ones
  // follow.
  std::optional<at::Tensor> amax_history;
};

// Computes y = x · Wᵀ + bias under a recipe, differentiable.
//   x: (…, K) and weight: (N, K), fp32 or bf16; bias: (N); y: (…, N) in x's dtype.
// Throws c10::ValueError on shapes, dtypes or state that do not fit.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, const Recipe& recipe,
                  const LinearState& state = {});

// The options of scaled_grouped_mm, with the tensors on A's device.
struct GroupedOptions {
  at::ScalarType out_dtype = at::kBFloat16;  // or fp32
  std::optional<at::Tensor> bias;            // (E, N)
  std::optional<at::Tensor> rng;             // as LinearState's
  std::optional<at::Tensor> row_ids;       // int32 (M): rows of the random counter; absent: 0, 1, …
  std::int64_t first_expert = 0;           // the number of matrix 0 among all ranks' experts
  std::optional<at::Tensor> amax_history;  // +delayed: fp32 (6, E, 1 + length)
  bool zeroes_tail = true;  // rows past the last group are zero in y and dA; else undefined
};

// Computes y = A_e · B_e for the rows A_e of each group e, under a recipe, differentiable in A, B
// and bias.
//   A: (M, K) and B: (E, K, N), fp32 or bf16, B's rows or columns adjacent; offs: int32 (E), the
//   end of each group among A's rows, read on the device alone; y: (M, N).
// Throws c10::ValueError on shapes, dtypes or state that do not fit.
at::Tensor scaled_grouped_mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& offs,
                             const Recipe& recipe, const GroupedOptions& options = {});

namespace nn {

struct LinearOptions {
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
  Recipe recipe;
  bool bias = true;
  std::string name = "linear";  // its random stream; give each layer its own
  std::int64_t seed = 0;
  std::int64_t data_parallel_rank = 0;  // ranks draw other bits, those that Python's layers draw
};

// torch::nn::Linear under a recipe; parameters `weight` (N, K) and `bias` (N), initialised as in
// torch. Under a stochastic recipe each forward pass in training mode draws fresh bits, and one in
// evaluation mode repeats the last. Their count is saved and loaded with the parameters, in an
// archive's entry "forwards". Each forward pass casts the weight; no codes are kept. Passes
// of one module may run at once, except in training mode under a stochastic recipe, where each
// counts. The constructor throws c10::ValueError for +delayed, whose histories a module lacks.
class LinearImpl : public torch::nn::Cloneable<LinearImpl> {
 public:
  explicit LinearImpl(LinearOptions options);
  LinearImpl(std::int64_t in_features, std::int64_t out_features, const Recipe& recipe);

  void reset() override;  // makes the parameters anew

  at::Tensor forward(const at::Tensor& x);

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  at::Tensor weight, bias;

 private:
  LinearOptions options_;
  std::int64_t forwards_ = 0;
};
TORCH_MODULE(Linear);

}  // namespace nn
}  // namespace minifloat

// Layers on CUDA against the same layers on the CPU. Both multiply the same bytes, so y and the
// gradients differ only by the order of the sums, by the FP8 engines' shorter accumulators and by
// one rounding to bf16.
#include <gtest/gtest.h>
#include <minifloat/torch.h>
#include <torch/torch.h>

namespace minifloat {
namespace {

// bf16 rounds to 2^-9 of a value, on either side. Hopper's FP8 sums keep 13 bits of the largest
// term. Both together stay below 2^-7 of the result's norm, while a wrong operand, scale or
// transpose errs by 100%.
constexpr double kBound = 0x1p-7;

struct Case {
  std::string recipe;
  std::int64_t rows, in_features, out_features;
};

struct Layer {
  at::Tensor y, dx, dw, db;
};

Layer run(const Case& c, at::ScalarType dtype, const at::Device& device) {
  torch::manual_seed(0);
  const auto draw = [&](at::IntArrayRef shape) {
    return torch::randn(shape).to(dtype).to(device).requires_grad_();
  };
  const at::Tensor x = draw({c.rows, c.in_features}), w = draw({c.out_features, c.in_features});
  const at::Tensor b = draw({c.out_features}), g = draw({c.rows, c.out_features}).detach();
  LinearState state;
  state.rng = at::tensor({7, 3, 11}, at::kLong).to(device);
  const Recipe recipe = Recipe::parse(c.recipe);
  if (recipe.is_delayed()) state.amax_history = torch::full({6, 3}, 5.0f).to(device);
  const at::Tensor y = linear(x, w, b, recipe, state);
  const auto grads = torch::autograd::grad({y}, {x, w, b}, {g});
  return {y.detach(), grads[0], grads[1], grads[2]};
}

double relative_error(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor a = got.cpu().to(at::kDouble), b = want.to(at::kDouble);
  return ((a - b).norm() / b.norm()).item<double>();
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const std::string& recipe : preset_names()) {
    out.push_back({recipe, 256, 384, 512});  // sizes that every engine takes
    out.push_back({recipe, 132, 272, 208});  // no whole 128-blocks
    out.push_back({recipe, 33, 71, 45});     // sizes of the exact product only
    out.push_back({recipe, 1, 128, 16});
  }
  return out;
}

void expect_as_on_the_cpu(at::ScalarType dtype) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.recipe + " " + std::to_string(c.rows) + "x" + std::to_string(c.in_features) +
                 "x" + std::to_string(c.out_features));
    const Layer got = run(c, dtype, at::kCUDA), want = run(c, dtype, at::kCPU);
    EXPECT_EQ(got.y.scalar_type(), dtype);
    EXPECT_LT(relative_error(got.y, want.y), kBound);
    EXPECT_LT(relative_error(got.dx, want.dx), kBound);
    EXPECT_LT(relative_error(got.dw, want.dw), kBound);
    EXPECT_LT(relative_error(got.db, want.db), kBound);
  }
}

TEST(CudaLinear, Bf16EqualsTheCpuWithinTheProducts) { expect_as_on_the_cpu(at::kBFloat16); }
TEST(CudaLinear, Fp32EqualsTheCpuWithinTheProducts) { expect_as_on_the_cpu(at::kFloat); }

TEST(CudaLinear, TensorsOfTwoDevicesAreRefusedOnTheHost) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const auto x = torch::randn({32, 32}, at::kCUDA), w = torch::randn({32, 32}, at::kCUDA);
  EXPECT_THROW(linear(x, w.cpu(), {}, Recipe::parse("mxfp8")), c10::ValueError);
  EXPECT_THROW(linear(x, w, torch::randn({32}), Recipe::parse("mxfp8")), c10::ValueError);
  LinearState state;
  state.rng = at::tensor({7, 3, 11}, at::kLong);
  EXPECT_THROW(linear(x, w, {}, Recipe::parse("nvfp4"), state), c10::ValueError);
}

}  // namespace
}  // namespace minifloat

// The C++ API: minifloat::linear and minifloat::nn::Linear against libtorch's own layers.
#include <gtest/gtest.h>
#include <minifloat/core/philox.h>
#include <minifloat/torch.h>
#include <torch/nn/modules/linear.h>
#include <torch/torch.h>

#include <sstream>

namespace minifloat {
namespace {

double relative_error(const at::Tensor& got, const at::Tensor& want) {
  return ((got - want).norm() / want.norm()).item<double>();
}

TEST(TorchLinear, Bf16RecipeIsTorchsOwnLinear) {
  torch::manual_seed(0);
  // Integers of 12 bits, which bf16 does not hold: fp32 inputs stay fp32. With weights of 0 and 1
  // a sum of 24 of them and the bias stays below 2^17, so every order of additions is exact.
  const auto draw = [](std::int64_t end, at::IntArrayRef shape) {
    return torch::randint(end, shape, torch::kFloat);
  };
  const auto x = draw(4096, {3, 5, 24}), w = draw(2, {17, 24}), b = draw(4096, {17});
  const auto y = linear(x, w, b, Recipe::parse("bf16"));
  EXPECT_TRUE(torch::equal(y, torch::linear(x, w, b)));
}

TEST(TorchLinear, GradientsFollowTheProducts) {
  torch::manual_seed(0);
  // Normal data under MXFP8 errs by about 2.6% an operand (3 mantissa bits, nearest), so a product
  // of two errs by about 3.7%. Twice that bounds it, and a wrong operand, scale or transpose errs
  // by 100%.
  constexpr double kBound = 0.075;
  const auto options = torch::requires_grad();
  const auto x = torch::randn({40, 96}, options), w = torch::randn({72, 96}, options);
  const auto g = torch::randn({40, 72});
  const auto y = linear(x, w, {}, Recipe::parse("mxfp8"));
  const auto grads = torch::autograd::grad({y}, {x, w}, {g});
  EXPECT_LT(relative_error(y, torch::linear(x, w)), kBound);
  EXPECT_LT(relative_error(grads[0], g.matmul(w)), kBound);
  EXPECT_LT(relative_error(grads[1], g.t().matmul(x)), kBound);
}

TEST(TorchLinear, ModulesAreCloned) {
  nn::LinearOptions options;
  options.in_features = 64;
  options.out_features = 48;
  options.recipe = Recipe::parse("fprop=nvfp4+sr*nvfp4 dgrad=bf16*bf16 wgrad=bf16*bf16");
  torch::nn::Sequential net(nn::Linear{options});
  const auto x = torch::randn({32, 64});
  net->forward(x);
  const auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  EXPECT_TRUE(torch::equal(clone->forward(x), net->forward(x)));  // the count of forwards too
  const torch::NoGradGuard guard;
  clone->parameters()[0].zero_();
  EXPECT_TRUE(net->parameters()[0].any().item<bool>());
  EXPECT_EQ(clone->parameters().size(), 2U);
}

TEST(TorchLinear, LoadedModulesDrawTheNextBits) {
  nn::LinearOptions options;
  options.in_features = options.out_features = 64;
  options.recipe = Recipe::parse("fprop=mxfp8+sr*mxfp8 dgrad=bf16*bf16 wgrad=bf16*bf16");
  torch::nn::Sequential net(nn::Linear{options}), loaded(nn::Linear{options});
  const at::Tensor x = at::randn({8, 64});
  for (int i = 0; i < 3; ++i) net->forward(x);
  std::stringstream file;
  torch::save(net, file);
  torch::load(loaded, file);
  EXPECT_TRUE(torch::equal(loaded->forward(x), net->forward(x)));
  torch::nn::Sequential plain(torch::nn::Linear(64, 64));
  std::stringstream other;
  torch::save(plain, other);
  torch::load(loaded, other);
  EXPECT_TRUE(torch::equal(loaded->parameters()[0], plain->parameters()[0]));
}

TEST(TorchLinear, RanksDrawOtherBits) {
  nn::LinearOptions options;
  options.in_features = options.out_features = 64;
  options.recipe = Recipe::parse("fprop=mxfp8+sr*mxfp8 dgrad=bf16*bf16 wgrad=bf16*bf16");
  options.seed = 5;
  nn::Linear first(options);
  options.data_parallel_rank = 1;
  nn::Linear second(options);
  second->weight = first->weight, second->bias = first->bias;
  const at::Tensor x = at::randn({8, 64}), y = first->forward(x);
  EXPECT_FALSE(torch::equal(second->forward(x), y));
  LinearState state;
  const auto seed = static_cast<std::int64_t>(mix_seed(5, 0));
  const auto stream = static_cast<std::int64_t>(fnv1a64("linear", 6));
  state.rng = at::tensor(std::vector<std::int64_t>{seed, 1, stream}, at::kLong);
  EXPECT_TRUE(torch::equal(linear(x, first->weight, first->bias, options.recipe, state), y));
}

TEST(TorchLinear, StochasticModulesDrawFreshBitsInTrainingOnly) {
  torch::manual_seed(0);
  nn::LinearOptions options;
  options.in_features = 64;
  options.out_features = 48;
  options.recipe = Recipe::parse("fprop=nvfp4+sr*nvfp4 dgrad=bf16*bf16 wgrad=bf16*bf16");
  nn::Linear layer(options);
  const auto x = torch::randn({32, 64});
  EXPECT_FALSE(torch::equal(layer(x), layer(x)));
  layer->eval();
  EXPECT_TRUE(torch::equal(layer(x), layer(x)));

  options.name = "another";
  nn::Linear other(options);
  other->weight.detach().copy_(layer->weight.detach());
  other->bias.detach().copy_(layer->bias.detach());
  layer->train();
  EXPECT_FALSE(torch::equal(other(x), layer(x)));  // another name, another stream
}

TEST(TorchLinear, BadInputSaysWhatWasExpected) {
  const auto x = torch::randn({4, 8}), w = torch::randn({6, 9});
  try {
    linear(x, w, {}, Recipe::parse("mxfp8"));
    FAIL() << "expected an error";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("expected weight (N, 8)"), std::string::npos)
        << error.what();
  }
  EXPECT_THROW(linear(x, torch::randn({6, 8}), {}, Recipe::parse("nvfp4")),
               c10::ValueError);  // no rng
  EXPECT_THROW(nn::Linear(0, 4, Recipe::parse("bf16")), c10::ValueError);
  EXPECT_THROW(nn::Linear(4, 4, Recipe::parse("fp8_delayed")), c10::ValueError);
}

}  // namespace
}  // namespace minifloat

// A small network trained under a recipe, in C++ alone.
//
//     cmake -S examples -B build/examples -DCMAKE_PREFIX_PATH=$(python -m minifloat --cmake-prefix)
//     cmake --build build/examples
//     build/examples/train nvfp4 300
//
// The task is the noisy XOR-like parity of the signs of two hidden directions of a 64-dimensional
// input. Prints the loss every 50 steps and exits with 1 unless the last loss is under a third of
// the first.
#include <minifloat/torch.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <string>

namespace {

struct Net : torch::nn::Module {
  minifloat::nn::Linear in{nullptr}, hidden{nullptr};
  torch::nn::Linear out{nullptr};  // the output layer stays in high precision

  explicit Net(const minifloat::Recipe& recipe) {
    const auto layer = [&](const char* name, std::int64_t k, std::int64_t n) {
      minifloat::nn::LinearOptions options;
      options.in_features = k;
      options.out_features = n;
      options.recipe = recipe;
      options.name = name;
      return register_module(name, minifloat::nn::Linear(options));
    };
    in = layer("in", 64, 256);
    hidden = layer("hidden", 256, 256);
    out = register_module("out", torch::nn::Linear(256, 1));
  }

  torch::Tensor forward(const torch::Tensor& x) {  // (batch, 64) -> (batch)
    return out(torch::gelu(hidden(torch::gelu(in(x))))).squeeze(1);
  }
};

struct Batch {
  torch::Tensor x, y;  // (batch, 64), (batch)
};

Batch draw(const torch::Tensor& directions, std::int64_t size) {
  const torch::Tensor x = torch::randn({size, 64});
  const torch::Tensor side = torch::matmul(x, directions);  // (batch, 2)
  return {x, (side.select(1, 0) * side.select(1, 1) > 0).to(torch::kFloat)};
}

}  // namespace

int main(int argc, char** argv) try {
  const minifloat::Recipe recipe = minifloat::Recipe::parse(argc > 1 ? argv[1] : "nvfp4");
  const int steps = argc > 2 ? std::atoi(argv[2]) : 300;

  torch::manual_seed(0);
  const torch::Tensor directions = torch::randn({64, 2});
  Net net(recipe);
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(3e-3));

  double first = 0.0, last = 0.0;
  for (int step = 0; step < steps; ++step) {
    const Batch batch = draw(directions, 512);
    const torch::Tensor loss =
        torch::binary_cross_entropy_with_logits(net.forward(batch.x), batch.y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();

    last = step == 0 ? loss.item<double>() : 0.9 * last + 0.1 * loss.item<double>();
    if (step == 0) first = last;
    if (step % 50 == 0 || step + 1 == steps)
      std::cout << recipe.str() << "  step " << step << "  loss " << last << "\n";
  }
  return last < first / 3 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "train: " << error.what() << "\n";
  return 2;
}

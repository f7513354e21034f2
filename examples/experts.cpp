// Experts trained under a recipe, in C++ alone: each token goes to one expert, whose rows need no
// alignment, and may be none.
//
//     build/examples/experts fp8_rowwise 200
//
// The task is a linear map for each of eight clusters of inputs. The router is the nearest center.
// Prints the loss every 50 steps and exits with 1 unless the last loss is under a tenth of the
// first.
#include <minifloat/torch.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <string>

namespace {

constexpr std::int64_t kExperts = 8, kInputs = 64, kOutputs = 32;

// Tokens in the order of their experts.
struct Batch {
  torch::Tensor x, y, offs;  // (tokens, kInputs), (tokens, kOutputs), int32 (kExperts)
};

Batch draw(const torch::Tensor& centers, const torch::Tensor& maps, std::int64_t tokens) {
  const torch::Tensor cluster = torch::randint(kExperts, {tokens});
  const torch::Tensor x = centers.index_select(0, cluster) + 0.5 * torch::randn({tokens, kInputs});
  const torch::Tensor expert = torch::cdist(x, centers).argmin(1);  // the router
  const torch::Tensor order = expert.argsort();
  const torch::Tensor sorted = x.index_select(0, order);
  const torch::Tensor of_rows = maps.index_select(0, expert.index_select(0, order));
  const torch::Tensor offs =
      torch::searchsorted(expert.index_select(0, order), torch::arange(kExperts),
                          /*out_int32=*/true, /*right=*/true);
  return {sorted, torch::bmm(sorted.unsqueeze(1), of_rows).squeeze(1), offs};
}

}  // namespace

int main(int argc, char** argv) try {
  const minifloat::Recipe recipe = minifloat::Recipe::parse(argc > 1 ? argv[1] : "fp8_rowwise");
  const int steps = argc > 2 ? std::atoi(argv[2]) : 200;

  torch::manual_seed(0);
  const torch::Tensor centers = 2 * torch::randn({kExperts, kInputs});
  const torch::Tensor maps = torch::randn({kExperts, kInputs, kOutputs}) / 8;
  torch::Tensor weight = torch::zeros({kExperts, kOutputs, kInputs}).requires_grad_();
  torch::optim::Adam optimizer({weight}, 3e-3);

  minifloat::GroupedOptions options;
  options.out_dtype = torch::kFloat;
  double first = 0, last = 0;
  for (int step = 0; step <= steps; ++step) {
    const Batch batch = draw(centers, maps, 300);
    options.rng = torch::tensor({std::int64_t{0}, std::int64_t{step}});
    const torch::Tensor y =
        minifloat::scaled_grouped_mm(batch.x, weight.transpose(1, 2), batch.offs, recipe, options);
    const torch::Tensor loss = torch::mse_loss(y, batch.y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
    if (step % 50 == 0) std::cout << "step " << step << "  loss " << last << "\n";
  }
  return last < first / 10 ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return EXIT_FAILURE;
}

// A layer with a format of its own for each product, and a product as a function. Exits with 1
// unless both give the same bytes.
#include <minifloat/torch.h>

using minifloat::Recipe;
const auto recipe = Recipe::parse("fprop=mxfp8*mxfp8 dgrad=bf16*bf16 wgrad=mxfp8*mxfp8");
struct Net : torch::nn::Module {
  minifloat::nn::Linear up = register_module("up", minifloat::nn::Linear(256, 1024, recipe));
  torch::Tensor forward(const torch::Tensor& x) { return torch::gelu(up(x)); }
};
torch::Tensor project(const torch::Tensor& x, const torch::Tensor& weight) {
  return minifloat::linear(x, weight, /*bias=*/{}, Recipe::parse("mxfp8"));
}

int main() {
  torch::manual_seed(0);
  Net net;
  net.up->bias.detach().zero_();
  const torch::Tensor x = torch::randn({8, 256}).requires_grad_();
  const torch::Tensor y = net.forward(x);
  y.sum().backward();
  const bool has_gradients = x.grad().defined() && net.up->weight.grad().defined();
  const bool is_equal = torch::equal(y, torch::gelu(project(x, net.up->weight)));
  return has_gradients && is_equal ? 0 : 1;  // both have mxfp8*mxfp8 in the forward product
}

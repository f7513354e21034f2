// A tensor of torch cast to codes by the library's own function: its memory is passed, not copied.
// Exits with 1 unless the values of the codes are near those of the tensor.
#include <minifloat/quantize.h>
#include <torch/torch.h>

#include <cstdint>

// Returns the (rows, code_cols) codes of x (rows, cols), float32 or bfloat16 with x.stride(1) == 1.
// scale: (rows, scale_cols) bytes, written. spec: of one-byte scales of blocks of one row
at::Tensor codes_of(const at::Tensor& x, const minifloat::Spec& spec, const at::Tensor& scale) {
  const bool is_float = x.scalar_type() == at::kFloat;
  const minifloat::TensorRef values = {
      .data = x.const_data_ptr(),
      .dtype = is_float ? minifloat::DType::kFloat32 : minifloat::DType::kBFloat16,
      .rows = x.size(0),
      .cols = x.size(1),
      .row_stride = x.stride(0),
      .device = x.is_cuda() ? minifloat::Device::kCuda : minifloat::Device::kCpu};
  const at::Tensor codes =
      at::empty({x.size(0), spec.code_cols(x.size(1))}, x.options().dtype(at::kByte));
  minifloat::Operand operand;
  operand.spec = spec;
  operand.codes = codes.mutable_data_ptr<std::uint8_t>();
  operand.scale = scale.mutable_data_ptr();
  minifloat::quantize(values, &operand, /*columnwise=*/nullptr);
  return codes;
}

int main() {
  torch::manual_seed(0);
  const minifloat::Spec spec = minifloat::Spec::parse("mxfp8");
  const at::Tensor x = torch::randn({256, 1000}, at::kBFloat16), y = torch::empty({256, 1000});
  const at::Tensor scale =
      torch::empty({spec.scale_rows(x.size(0)), spec.scale_cols(x.size(1))}, at::kByte);
  const at::Tensor codes = codes_of(x, spec, scale);
  minifloat::dequantize({.spec = spec,
                         .codes = codes.const_data_ptr<std::uint8_t>(),
                         .scale = scale.const_data_ptr(),
                         .rows = x.size(0),
                         .cols = x.size(1)},
                        minifloat::DType::kFloat32, y.mutable_data_ptr<float>());
  return at::allclose(y, x.to(at::kFloat), /*rtol=*/0.07, /*atol=*/0.01) ? 0 : 1;
}

// A matrix cast to NVFP4 codes and back, on the CPU and without torch.
//
//     build/examples/cast
//
// Prints the sizes and the relative error, and exits with 1 unless it is below an eighth.
#include <minifloat/quantize.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <vector>

int main() try {
  constexpr std::int64_t kRows = 256, kCols = 1000;
  std::vector<float> x(kRows * kCols), y(x.size());
  std::mt19937 bits(0);
  std::normal_distribution<float> normal;
  for (float& value : x) value = normal(bits);

  const minifloat::Spec spec = minifloat::Spec::parse("nvfp4");
  std::vector<std::uint8_t> codes(kRows * spec.code_cols(kCols));
  std::vector<std::uint8_t> scale(spec.scale_rows(kRows) * spec.scale_cols(kCols));  // E4M3
  float amax = 0;

  const minifloat::TensorRef values = {
      .data = x.data(), .rows = kRows, .cols = kCols, .row_stride = kCols};
  minifloat::Operand rowwise;
  rowwise.spec = spec;
  rowwise.codes = codes.data();
  rowwise.scale = scale.data();
  rowwise.amax = &amax;  // the tensor scale is made of it
  minifloat::quantize(values, &rowwise, /*columnwise=*/nullptr);

  const minifloat::Quantized operand = {.spec = spec,
                                        .codes = codes.data(),
                                        .scale = scale.data(),
                                        .amax = &amax,
                                        .rows = kRows,
                                        .cols = kCols};
  minifloat::dequantize(operand, minifloat::DType::kFloat32, y.data());

  double error = 0, square = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (y[i] - x[i]) * (y[i] - x[i]);
    square += x[i] * x[i];
  }
  const double relative = std::sqrt(error / square);
  std::cout << codes.size() << " bytes of codes, " << scale.size() << " of scales, relative error "
            << relative << "\n";
  return relative < 0.125 ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return EXIT_FAILURE;
}

// The exact grouped engine of GPUs on tensors of the CPU, whose _grouped_mm has the same conditions
// on strides: against the CPU's engine, with layouts and sizes that are no multiples of 16 bytes.
// And the warning of a build without kernels for Hopper.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ops/bridge.h"
#include "ops/groups.h"
#include "ops/ops.h"
#include "products/engines.h"
#include "products/grouped.h"
#include "products/products.h"

namespace minifloat::torch_ops {
namespace {

// -1, 0 or 1 with at most 120 terms a sum: every order of additions is exact, in bf16 too.
Tensor draw(at::IntArrayRef shape) {
  return torch::randint(-1, 2, shape, torch::kFloat).to(at::kBFloat16);
}

// The layouts of values: adjacent along either dimension; rows whose pitch, or whose address, is no
// multiple of 16 bytes.
enum class Layout { kRows, kColumns, kPitch, kOffset };
constexpr Layout kLayouts[] = {Layout::kRows, Layout::kColumns, Layout::kPitch, Layout::kOffset};

Tensor laid_out(const Tensor& x, Layout layout) {
  if (layout == Layout::kColumns) return x.transpose(-2, -1).contiguous().transpose(-2, -1);
  if (layout == Layout::kRows) return x.contiguous();
  const std::int64_t begin = layout == Layout::kOffset ? 1 : 0, end = begin + x.size(-1);
  const std::int64_t pitch = layout == Layout::kOffset ? round_up<std::int64_t>(end, 8) : end + 3;
  return torch::constant_pad_nd(x, {begin, pitch - end}).narrow(-1, begin, x.size(-1));
}

ProductInput input_of_values(const Spec& spec, const Tensor& x, Layout layout, bool columnwise,
                             const Groups& groups) {
  if (spec.is_bf16()) {
    return Values{laid_out(columnwise ? x.transpose(0, 1) : x, layout)};
  }
  QuantizeOptions options;
  options.groups = groups;
  const auto both = columnwise ? quantize(x.contiguous(), "", spec.str(), options)
                               : quantize(x.contiguous(), spec.str(), "", options);
  const QuantizedOperand& q = columnwise ? both.second : both.first;
  return Codes{q.codes, q.scale, q.amax};
}

// Products without factors are exact. Those with factors round sums of bf16 once for each, at most
// three times by 2^-9. A CPU may multiply each of up to 120 terms, of -1, 0 or 1, by the factor
// before it adds them: sums of zero are then off by up to 120 roundings of 2^-24.
void expect_equal_engines(const ProductCall& call, const Tensor& table, const std::string& what) {
  Tensor got = kExactGroupedCuda.multiply(call), want = kExactGroupedCpu.multiply(call);
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  if (call.groups.unit == 0) {
    const std::int64_t rows = table[0][-1].item<std::int64_t>();
    got = got.narrow(0, 0, rows), want = want.narrow(0, 0, rows);
  }
  const auto has_factors_of = [](const Spec& s) { return s.has_tensor_amax() || s.has_row_amax(); };
  const bool has_factors = has_factors_of(call.product.a) || has_factors_of(call.product.b);
  const double relative = has_factors ? 0x1p-7 : 0.0, absolute = has_factors ? 0x1p-17 : 0.0;
  EXPECT_TRUE(torch::allclose(got, want, relative, absolute)) << what;
}

const std::vector<std::string> kProducts = {"bf16*bf16", "bf16*mxfp8", "mxfp8*bf16",
                                            "e4m3/tensor*e4m3/row", "bf16*e4m3/tensor"};
const std::vector<std::int32_t> kEnds = {5, 5, 12, 40};
constexpr std::int64_t kRows = 43, kGroups = 4;

TEST(ExactGrouped, AlongRows) {
  torch::manual_seed(0);
  const Tensor table = group_table("test", torch::tensor(kEnds, torch::kInt), kRows);
  const Groups groups = {table, 0};
  const std::optional<Tensor> bias = draw({kGroups, 12});
  for (const std::string& text : kProducts)
    for (const std::int64_t k : {1, 8, 20, 32})
      for (const std::int64_t n : {1, 12, 24})
        for (const Layout layout : kLayouts) {
          const Product& product = bridge::parse_product(text);
          const ProductInput a = input_of_values(product.a, draw({kRows, k}), layout, false,
                                                 groups),
                             b = input_of_values(product.b, draw({kGroups, n, k}), layout, false,
                                                 {});
          const Result result = {n == 12 ? bias : std::nullopt, at::kBFloat16};
          expect_equal_engines({product, a, b, k, result, groups}, table,
                               text + " k " + std::to_string(k) + " n " + std::to_string(n) +
                                   " layout " + std::to_string(static_cast<int>(layout)));
        }
}

TEST(ExactGrouped, AlongTheContraction) {
  torch::manual_seed(0);
  const Tensor table = group_table("test", torch::tensor(kEnds, torch::kInt), kRows);
  for (const std::string& text : kProducts)
    for (const std::int64_t m : {1, 8, 12})
      for (const std::int64_t n : {1, 20, 24})
        for (const Layout layout : kLayouts) {
          const Product& product = bridge::parse_product(text);
          const Groups groups = {table, 32};
          const ProductInput a = input_of_values(product.a, draw({kRows, m}), layout, true, groups),
                             b = input_of_values(product.b, draw({kRows, n}), layout, true, groups);
          const Result result = {std::nullopt, at::kFloat};
          const std::int64_t length = length_of(kRows, groups).expect_int();
          expect_equal_engines({product, a, b, length, result, groups}, table,
                               text + " m " + std::to_string(m) + " n " + std::to_string(n) +
                                   " layout " + std::to_string(static_cast<int>(layout)));
        }
}

struct Warnings : c10::WarningHandler {
  std::vector<std::string> texts;
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
};

TEST(WithoutKernels, TheFirstProductOnHopperWarns) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (const int capability : {kNoGpu, kBlackwell}) warn_without_kernels(capability);
  EXPECT_TRUE(warnings.texts.empty());
  for (int i = 0; i < 2; ++i) warn_without_kernels(kHopper);
  ASSERT_EQ(warnings.texts.size(), has_grouped_products() ? 0u : 1u);
  for (const std::string& text : warnings.texts)
    EXPECT_NE(text.find("FP8 takes up to 1.3 times as long"), std::string::npos) << text;
}

}  // namespace
}  // namespace minifloat::torch_ops

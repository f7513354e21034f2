// What the inspector reads of an operand and of a product, as one float64 vector each, so that a
// layer's numbers stay on the device until all are known.
//
//     operand_statistics    the cast of x against its values, by the names of statistic_names
//     result_error          a product under a recipe against the exact one, and what the difference
//                           does to the loss
//
// The ops are composed of quantize, dequantize, hadamard and of torch's reductions: no arithmetic
// of a format or a scale is written here. A value is saturated where the largest code of its block
// stands for less than it, by more than fp32's roundings.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <string>
#include <vector>

#include "minifloat/core/eden.h"
#include "minifloat/core/format.h"
#include "minifloat/core/hadamard.h"
#include "minifloat/core/philox.h"
#include "ops/bridge.h"
#include "ops/ops.h"
#include "ops/tangents.h"

namespace minifloat {
namespace {

using at::Tensor;

// The numbers before the histogram, in order. Changed together with statistic_names.
constexpr std::int64_t kNumbers = 11;
constexpr std::int64_t kExponents = 256;  // of fp32: 2^-127 and smaller, 2^-126 to 2^127, NaN
constexpr double kRoundings = 0x1p-19;    // of encode, of the element and of the value, in fp32
constexpr double kOutlier = 4;            // times the median channel

std::vector<std::string> statistic_names() {
  return {"elements", "signal", "noise",       "saturated", "flushed",         "nonfinite",
          "amax",     "scales", "zero_scales", "channels",  "outlier_channels"};
}

Tensor dequantize(const torch_ops::QuantizedOperand& q, const std::string& spec,
                  std::int64_t cols) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const std::string&,
                           c10::SymInt, at::ScalarType, const std::optional<Tensor>&, std::int64_t);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("minifloat::dequantize", "")
                             .typed<Signature>();
  return op.call(q.codes, q.scale, q.amax, spec, cols, at::kFloat, std::nullopt, 0);
}

Tensor hadamard(const Tensor& x, std::int64_t points, bool columnwise, std::uint32_t signs) {
  using Signature = Tensor(const Tensor&, std::int64_t, bool, std::int64_t,
                           const std::optional<Tensor>&, std::int64_t);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("minifloat::hadamard", "").typed<Signature>();
  return op.call(x, points, columnwise, signs, std::nullopt, 0);
}

// Returns the operand as the spec's transform gives it, in float32. The signs of +eden are drawn
// from rng, for which the host waits for the device.
Tensor transformed(const Tensor& x, const Spec& spec, bool columnwise,
                   const std::optional<Tensor>& rng, std::int64_t stream) {
  if (!spec.is_eden())
    return hadamard(x, spec.transform, columnwise, kHadamardSigns).to(at::kFloat);
  const Tensor state = rng->cpu();
  const RandomKey key =
      random_key(state.const_data_ptr<std::int64_t>(), static_cast<int>(state.numel()),
                 static_cast<std::uint64_t>(stream));
  const HadamardSigns signs = eden_signs(key);
  std::vector<float> flips(static_cast<std::size_t>(x.size(columnwise ? 0 : 1)));
  for (std::size_t i = 0; i < flips.size(); ++i) {
    const int point = static_cast<int>(i % kEdenPoints);
    flips[i] = apply_sign(1.0f, signs.of_16(point / 16), point);
  }
  const Tensor each = at::tensor(flips).to(x.options());
  const Tensor flipped = x * (columnwise ? each.unsqueeze(1) : each);
  return hadamard(flipped, spec.transform, columnwise, 0).to(at::kFloat);
}

std::int64_t largest_byte(Elements elements) {
  switch (elements) {
    case Elements::kE4m3: return E4M3::kMaxBits;
    case Elements::kE5m2: return E5M2::kMaxBits;
    case Elements::kE2m1: return E2M1::kMaxBits << 4 | E2M1::kMaxBits;  // two codes
    case Elements::kBf16: break;
  }
  return 0;
}

Tensor amax_of(const Tensor& t) {
  if (t.numel() == 0) return at::zeros({}, t.options());
  const auto [least, most] = at::aminmax(t);
  return at::maximum(least.neg(), most);
}

// Returns what values with this amax are divided by before they are squared, so that the squares of
// small gradients stay within fp32.
Tensor unit_of(const Tensor& amax) { return at::where(amax > 0, amax, 1); }

// Returns the sum of squares in float64, of values that were divided by `unit`.
Tensor sum_of_squares(const Tensor& divided, const Tensor& unit) {
  return divided.square().sum().to(at::kDouble).mul(unit.to(at::kDouble).square());
}

Tensor double_of(const Tensor& x, double value) {
  return at::full({}, value, x.options().dtype(at::kDouble));
}

// Returns the scales as float32.
Tensor scale_values(const Tensor& scale, const Spec& spec) {
  if (scale.scalar_type() == at::kFloat) return scale;
  const bool is_e8m0 = spec.scale_type() == ScaleType::kE8m0;
  return scale.view(is_e8m0 ? at::kFloat8_e8m0fnu : at::kFloat8_e4m3fn).to(at::kFloat);
}

// Counts scales by the exponent field of fp32. Scales that are 0 are in no count. Whole numbers in
// float64 have one sum in any order.
Tensor histogram_of(const Tensor& scales) {
  const Tensor found = scales.flatten();
  const Tensor field = found.view(at::kInt).bitwise_right_shift(23).bitwise_and(0xFF);
  const Tensor place = field.masked_fill(found.eq(0), kExponents).to(at::kLong);
  const auto options = scales.options().dtype(at::kDouble);
  return at::zeros({kExponents + 1}, options)
      .scatter_add_(0, place, at::ones(place.sizes(), options))
      .slice(0, 0, kExponents);
}

Tensor statistics_meta(const Tensor& x, const std::string& text, bool,
                       const std::optional<Tensor>& amax, const std::optional<Tensor>& rng,
                       std::int64_t) {
  bridge::check_values("operand_statistics", x);
  TORCH_CHECK_VALUE(x.dim() == 2, "operand_statistics: expected x (rows, cols), got ", x.dim(),
                    " dimensions");
  TORCH_CHECK_VALUE(!bridge::parse_spec(text).is_bf16(),
                    "operand_statistics: bf16 is the identity and has no codes; expected a "
                    "quantizing spec");
  if (amax) bridge::check_same_device("operand_statistics", "amax", *amax, x);
  if (rng) bridge::check_rng("operand_statistics", *rng, x);
  return at::empty({kNumbers + kExponents}, x.options().dtype(at::kDouble));
}

Tensor statistics_kernel(const Tensor& x, const std::string& text, bool columnwise,
                         const std::optional<Tensor>& amax, const std::optional<Tensor>& rng,
                         std::int64_t stream) {
  statistics_meta(x, text, columnwise, amax, rng, stream);
  const at::AutoDispatchBelowADInplaceOrView below;
  const Spec& spec = bridge::parse_spec(text);
  const std::string row = columnwise ? "" : text, col = columnwise ? text : "";
  const std::optional<Tensor> none;
  const torch_ops::QuantizeOptions options = {.amax_row = columnwise ? none : amax,
                                              .amax_col = columnwise ? amax : none,
                                              .rng = rng,
                                              .stream_row = stream,
                                              .stream_col = stream};
  const auto both = torch_ops::quantize(x, row, col, options);
  const torch_ops::QuantizedOperand& q = columnwise ? both.second : both.first;
  const std::int64_t cols = x.size(columnwise ? 0 : 1);

  // The values that were cast, those that the codes stand for, and the largest of each block.
  const Tensor y = spec.transform ? transformed(x, spec, columnwise, rng, stream)
                                  : (columnwise ? x.t() : x).to(at::kFloat).contiguous();
  const Tensor values = dequantize(q, text, cols);
  torch_ops::QuantizedOperand top = q;
  top.codes = at::full_like(q.codes, largest_byte(spec.elements));
  Tensor largest = dequantize(top, text, cols);
  Tensor saturated = y.abs().gt(largest.mul_(1 + kRoundings));
  if (spec.rule == ScaleRule::kNvfp4) saturated.logical_and_(largest > 0);  // a scale may be 0

  const Tensor amax_of_y = amax_of(y), unit = unit_of(amax_of_y);
  const Tensor squares = (spec.transform ? x.to(at::kFloat) : y).div(unit).square();
  const Tensor channels = squares.sum(spec.transform || !columnwise ? 0 : 1);
  const Tensor outliers = channels.numel() > 0
                              ? channels.gt(channels.median() * (kOutlier * kOutlier)).sum()
                              : double_of(x, 0);
  const Tensor signal = spec.transform ? sum_of_squares(y.div(unit), unit)
                                       : channels.sum().to(at::kDouble).mul(unit).mul(unit);
  const Tensor scales = scale_values(q.scale, spec);
  const Tensor flushed = at::count_nonzero(y).sub(at::count_nonzero(values)).clamp_min(0);
  const std::vector<Tensor> numbers = {double_of(x, static_cast<double>(y.numel())),
                                       signal,
                                       sum_of_squares(y.sub(values).div_(unit), unit),
                                       at::count_nonzero(saturated),
                                       flushed,
                                       at::count_nonzero(x - x),
                                       amax_of_y,
                                       double_of(x, static_cast<double>(scales.numel())),
                                       scales.eq(0).sum(),
                                       double_of(x, static_cast<double>(channels.numel())),
                                       outliers};
  std::vector<Tensor> parts;
  for (const Tensor& number : numbers) parts.push_back(number.to(at::kDouble).view({1}));
  parts.push_back(histogram_of(scales));
  return at::cat(parts);
}

Tensor error_meta(const Tensor& result, const Tensor& reference,
                  const std::optional<Tensor>& gradient) {
  const auto check = [&](const char* name, const Tensor& t) {
    bridge::check_value_dtype("result_error", name, t);
    TORCH_CHECK_VALUE(t.dim() == 2 && t.sizes() == result.sizes(), "result_error: expected ", name,
                      " as a matrix of the result's shape ", result.sizes(), ", got ", t.sizes());
    bridge::check_same_device("result_error", name, t, result);
  };
  check("result", result);
  check("reference", reference);
  if (gradient) check("gradient", *gradient);
  return at::empty({4}, result.options().dtype(at::kDouble));
}

Tensor error_kernel(const Tensor& result, const Tensor& reference,
                    const std::optional<Tensor>& gradient) {
  error_meta(result, reference, gradient);
  bridge::check_memory("result_error", "result", result);
  bridge::check_memory("result_error", "reference", reference);
  if (gradient) bridge::check_memory("result_error", "gradient", *gradient);
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor exact = reference.to(at::kFloat), difference = result.to(at::kFloat).sub(exact);
  Tensor first = double_of(result, 0), second = first;
  if (gradient) {
    const Tensor by_row = difference.mul(*gradient).sum(1, false, at::kDouble);
    first = by_row.sum();
    second = by_row.square().sum();
  }
  const Tensor unit = unit_of(amax_of(exact));
  return at::stack({sum_of_squares(difference.div(unit), unit),
                    sum_of_squares(exact.div(unit), unit), first, second});
}

void register_statistics(torch::Library& m) {
  m.impl("operand_statistics", statistics_kernel);
  m.impl("result_error", error_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CPU, m) { register_statistics(m); }
TORCH_LIBRARY_IMPL(minifloat, CUDA, m) { register_statistics(m); }
TORCH_LIBRARY_IMPL(minifloat, Meta, m) {
  m.impl("operand_statistics", statistics_meta);
  m.impl("result_error", error_meta);
}
TORCH_LIBRARY_IMPL(minifloat, Autograd, m) {
  for (const char* op : {"operand_statistics", "result_error"})
    m.impl(op, torch_ops::without_derivative());
}
TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) { m.impl("statistic_names", statistic_names); }

}  // namespace minifloat

// What the inspector reads of operands and of products, as one float64 vector each, so that a
// layer's numbers stay on the device until all are known.
//
//     operand_statistics    casts of matrices against their values, by the names of statistic_names
//     result_error          products under a recipe against the exact ones, and what the difference
//                           does to the loss
//
// Each takes matrices of one shape, of several layers: a GPU needs longer to launch the reductions
// of a small matrix than to compute them. A matrix is cast alone, so its counts are its own; beside
// others float32 sums may round otherwise.
//
// The ops are composed of quantize, dequantize, hadamard and of torch's reductions: no arithmetic
// of a format or a scale is written here. A value is saturated where the largest code of its block
// stands for less than it, by more than fp32's roundings.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "minifloat/core/eden.h"
#include "minifloat/core/format.h"
#include "minifloat/core/hadamard.h"
#include "minifloat/core/philox.h"
#include "ops/bridge.h"
#include "ops/op.h"
#include "ops/ops.h"

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

// Returns the operand as the spec's transform gives it, in float32. The signs of +eden are drawn
// from rng, for which the host waits for the device.
Tensor transformed(const Tensor& x, const Spec& spec, bool columnwise,
                   const std::optional<Tensor>& rng, std::int64_t stream) {
  if (!spec.is_eden())
    return torch_ops::hadamard(x, spec.transform, columnwise, kHadamardSigns).to(at::kFloat);
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
  return torch_ops::hadamard(flipped, spec.transform, columnwise, 0).to(at::kFloat);
}

std::int64_t largest_byte(Elements elements) {
  switch (elements) {
    case Elements::kE4m3: return E4M3::kMaxBits;
    case Elements::kE5m2: return E5M2::kMaxBits;
    case Elements::kE2m1: return E2M1::kMaxBits << 4 | E2M1::kMaxBits;  // two codes
    case Elements::kE1m2: return E1M2::kMaxBits << 4 | E1M2::kMaxBits;
    case Elements::kBf16: break;
  }
  return 0;
}

// The functions below take matrices (n, rows, cols) or vectors (n, length), and return (n).

Tensor amax_of(const Tensor& t) {
  if (t.numel() == 0) return at::zeros({t.size(0)}, t.options());
  const auto [least, most] = at::aminmax(t.flatten(1), 1);
  return at::maximum(least.neg(), most).abs();  // of zeros +0
}

// Returns what values with this amax are divided by before they are squared, so that the squares of
// small gradients stay within fp32.
Tensor unit_of(const Tensor& amax) { return at::where(amax > 0, amax, 1); }

// Divides matrices by their units.
Tensor in_units(const Tensor& t, const Tensor& unit) { return t.div(unit.view({-1, 1, 1})); }

// Returns the sums of squares in float64, of values that were divided by `unit`.
Tensor sum_of_squares(const Tensor& divided, const Tensor& unit) {
  return divided.square().sum({1, 2}).to(at::kDouble).mul(unit.to(at::kDouble).square());
}

// Counts the channels whose squares are more than kOutlier² times the lower median's.
Tensor outliers_of(const Tensor& channels) {
  const std::int64_t count = channels.size(1);
  if (count == 0) return at::zeros({channels.size(0)}, channels.options());
  const Tensor sorted = std::get<0>(channels.sort(1));
  const Tensor median = sorted.slice(1, (count - 1) / 2, (count - 1) / 2 + 1);
  return channels.gt(median * (kOutlier * kOutlier)).sum(1);
}

// Returns the scales as float32.
Tensor scale_values(const Tensor& scale, const Spec& spec) {
  if (scale.scalar_type() == at::kFloat) return scale;
  const bool is_e8m0 = spec.scale_type() == ScaleType::kE8m0;
  return scale.view(is_e8m0 ? at::kFloat8_e8m0fnu : at::kFloat8_e4m3fn).to(at::kFloat);
}

// Counts scales (n, length) by the exponent field of fp32: (n, kExponents). Scales of 0 are in no
// count. Whole numbers in float64 have one sum in any order. Parts of the scales are counted apart,
// since a GPU adds to one place at a time.
Tensor histogram_of(const Tensor& scales) {
  constexpr std::int64_t kMostParts = 64;
  const std::int64_t n = scales.size(0), length = scales.size(1);
  const std::int64_t parts = length > 0 ? std::min(kMostParts, length & -length) : 1;
  const Tensor found = scales.reshape({n * parts, length / parts});
  const Tensor field = found.view(at::kInt).bitwise_right_shift(23).bitwise_and(0xFF);
  const Tensor place = field.masked_fill(found.eq(0), kExponents).to(at::kLong);
  const auto options = scales.options().dtype(at::kDouble);
  return at::zeros({n * parts, kExponents + 1}, options)
      .scatter_add_(1, place, at::ones({1, 1}, options).expand_as(place))
      .view({n, parts, kExponents + 1})
      .sum(1)
      .slice(1, 0, kExponents);
}

// Returns matrices as one tensor: a view of one alone.
Tensor stacked(at::TensorList t) {
  return t.size() == 1 ? t[0].contiguous().unsqueeze(0) : at::stack(t);
}
// Frees the list.
Tensor stacked(std::vector<Tensor>&& t) {
  const std::vector<Tensor> list = std::move(t);
  return stacked(at::TensorList(list));
}

constexpr const char* kOperandStatistics = "operand_statistics";

void check_matrices(at::TensorList x, const Spec& spec, const std::optional<at::TensorList>& amax,
                    const std::optional<Tensor>& rng, std::int64_t batch_index) {
  TORCH_CHECK_VALUE(!x.empty(), kOperandStatistics, ": expected matrices x, got none");
  for (const Tensor& t : x) {
    bridge::check_values(kOperandStatistics, t);
    TORCH_CHECK_VALUE(t.sizes() == x[0].sizes() && t.scalar_type() == x[0].scalar_type(),
                      kOperandStatistics, ": expected x of one shape and dtype, got ",
                      x[0].scalar_type(), " ", x[0].sizes(), " and ", t.scalar_type(), " ",
                      t.sizes());
    bridge::check_same_device(kOperandStatistics, "x", t, x[0]);
  }
  TORCH_CHECK_VALUE(x[0].dim() == 2, kOperandStatistics, ": expected x (rows, cols), got ",
                    x[0].dim(), " dimensions");
  TORCH_CHECK_VALUE(!spec.is_bf16(), kOperandStatistics,
                    ": bf16 is the identity and has no codes; expected a quantizing spec");
  if (amax) {
    TORCH_CHECK_VALUE(amax->size() == x.size(), kOperandStatistics,
                      ": expected an amax of each of ", x.size(), " matrices, got ", amax->size());
    for (const Tensor& t : *amax) bridge::check_same_device(kOperandStatistics, "amax", t, x[0]);
  }
  if (rng) bridge::check_rng(kOperandStatistics, *rng, x[0]);
  TORCH_CHECK_VALUE(batch_index >= 0 && batch_index <= INT32_MAX, kOperandStatistics,
                    ": expected batch_index from 0 to ", INT32_MAX, ", got ", batch_index);
}

// The values that were cast, those that the codes stand for, and the largest of each block, all
// (n, rows, cols) as read; the scales (n, length). float32
struct Casts {
  Tensor y, values, largest, scales;
};

Casts cast_each(at::TensorList x, const Spec& spec, bool columnwise,
                const std::optional<at::TensorList>& amax, const std::optional<Tensor>& rng,
                std::int64_t stream, std::int64_t batch_index) {
  const std::string text = spec.str(), row = columnwise ? "" : text, col = columnwise ? text : "";
  const std::int64_t cols = x[0].size(columnwise ? 0 : 1);
  const int rows_dim = columnwise ? 1 : 0;  // of x, for the rows of the operand as read
  std::array<c10::SymInt, 2> origin = {0, 0};
  origin[rows_dim] = batch_index * x[0].size(rows_dim);
  std::vector<Tensor> y, values, largest, scales;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::optional<Tensor> none, given = amax ? std::optional((*amax)[i]) : none;
    const torch_ops::QuantizeOptions options = {.amax_row = columnwise ? none : given,
                                                .amax_col = columnwise ? given : none,
                                                .rng = rng,
                                                .stream_row = stream,
                                                .stream_col = stream,
                                                .origin = origin};
    const auto both = torch_ops::quantize(x[i], row, col, options);
    torch_ops::QuantizedOperand q = columnwise ? both.second : both.first;
    y.push_back(spec.transform ? transformed(x[i], spec, columnwise, rng, stream)
                               : (columnwise ? x[i].t() : x[i]));
    values.push_back(torch_ops::dequantize(q, text, cols, at::kFloat));
    scales.push_back(q.scale.flatten());
    q.codes = at::full_like(q.codes, largest_byte(spec.elements));
    largest.push_back(torch_ops::dequantize(q, text, cols, at::kFloat));
  }
  return {stacked(std::move(y)).to(at::kFloat), stacked(std::move(values)),
          stacked(std::move(largest)), scale_values(stacked(std::move(scales)), spec)};
}

Tensor statistics_kernel(at::TensorList x, const std::string& text, bool columnwise,
                         const std::optional<at::TensorList>& amax,
                         const std::optional<Tensor>& rng, std::int64_t stream,
                         std::int64_t batch_index) {
  const Spec& spec = bridge::parse_spec(text);
  check_matrices(x, spec, amax, rng, batch_index);
  if (x[0].is_meta())
    return at::empty({static_cast<std::int64_t>(x.size()), kNumbers + kExponents},
                     x[0].options().dtype(at::kDouble));
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto [y, values, largest, scales] =
      cast_each(x, spec, columnwise, amax, rng, stream, batch_index);
  Tensor saturated = y.abs().gt(largest.mul(1 + kRoundings));
  if (spec.has_outer_amax()) saturated.logical_and_(largest > 0);  // a scale may be 0

  // Channels are the columns of x as it lies, untransformed.
  const Tensor plain = spec.transform ? stacked(x).to(at::kFloat) : y;
  const Tensor amax_of_y = amax_of(y), unit = unit_of(amax_of_y);
  const Tensor channels = in_units(plain, unit).square().sum(spec.transform || !columnwise ? 1 : 2);
  const Tensor signal = spec.transform
                            ? sum_of_squares(in_units(y, unit), unit)
                            : channels.sum(1).to(at::kDouble).mul(unit.to(at::kDouble).square());
  const auto count = [](const Tensor& t) { return at::count_nonzero(t, {1, 2}); };
  const auto each = [&](std::int64_t number) {
    return at::full({y.size(0)}, static_cast<double>(number), y.options().dtype(at::kDouble));
  };
  const std::vector<Tensor> numbers = {
      each(y.size(1) * y.size(2)),
      signal,
      sum_of_squares(y.sub(values).div_(unit.view({-1, 1, 1})), unit),
      count(saturated),
      count(y).sub(count(values)).clamp_min(0),
      count(plain - plain),
      amax_of_y,
      each(scales.size(1)),
      scales.eq(0).sum(1),
      each(channels.size(1)),
      outliers_of(channels)};
  std::vector<Tensor> parts;
  for (const Tensor& number : numbers) parts.push_back(number.to(at::kDouble).unsqueeze(1));
  parts.push_back(histogram_of(scales));
  return at::cat(parts, 1);
}

constexpr const char* kResultError = "result_error";

Tensor error_kernel(at::TensorList results, at::TensorList references,
                    const std::optional<at::TensorList>& gradients) {
  TORCH_CHECK_VALUE(!results.empty(), kResultError, ": expected results, got none");
  const Tensor& first = results[0];
  const auto check = [&](const char* name, at::TensorList list) {
    TORCH_CHECK_VALUE(list.size() == results.size(), kResultError, ": expected ", results.size(),
                      " ", name, ", one for each result, got ", list.size());
    for (const Tensor& t : list) {
      bridge::check_value_dtype(kResultError, name, t);
      TORCH_CHECK_VALUE(t.dim() == 2 && t.sizes() == first.sizes(), kResultError, ": expected ",
                        name, " as matrices of the first result's shape ", first.sizes(), ", got ",
                        t.sizes());
      TORCH_CHECK_VALUE(t.scalar_type() == list[0].scalar_type(), kResultError, ": expected ", name,
                        " of one dtype, got ", list[0].scalar_type(), " and ", t.scalar_type());
      bridge::check_same_device(kResultError, name, t, first);
    }
  };
  check("results", results);
  check("references", references);
  if (gradients) check("gradients", *gradients);
  if (first.is_meta())
    return at::empty({static_cast<std::int64_t>(results.size()), 4},
                     first.options().dtype(at::kDouble));
  for (const Tensor& t : results) bridge::check_memory(kResultError, "results", t);
  for (const Tensor& t : references) bridge::check_memory(kResultError, "references", t);
  for (const Tensor& t : gradients.value_or(at::TensorList()))
    bridge::check_memory(kResultError, "gradients", t);
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor exact = stacked(references).to(at::kFloat),
               difference = stacked(results).to(at::kFloat).sub(exact);
  Tensor of_sum = at::zeros({exact.size(0)}, exact.options().dtype(at::kDouble)), of_rows = of_sum;
  if (gradients) {
    const Tensor by_row = difference.mul(stacked(*gradients)).sum(2, false, at::kDouble);
    of_sum = by_row.sum(1);
    of_rows = by_row.square().sum(1);
  }
  const Tensor unit = unit_of(amax_of(exact));
  return at::stack({sum_of_squares(in_units(difference, unit), unit),
                    sum_of_squares(in_units(exact, unit), unit), of_sum, of_rows},
                   1);
}

const torch_ops::Op operand_statistics_op(kOperandStatistics, statistics_kernel,
                                          torch_ops::without_derivative());
const torch_ops::Op result_error_op(kResultError, error_kernel, torch_ops::without_derivative());

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) { m.impl("statistic_names", statistic_names); }

}  // namespace minifloat

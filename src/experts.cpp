// minifloat/experts.h: the checks before a backend is called.
#include "minifloat/experts.h"

#include <algorithm>

#include "cpu/experts.h"
#include "minifloat/core/block.h"
#include "minifloat/error.h"
#include "minifloat/group_checks.h"
#include "on_device.h"
#include "quantize_checks.h"
#if defined(MINIFLOAT_WITH_CUDA)
#include "cuda/experts/experts.h"
#endif

namespace minifloat {
namespace {

void check_places(const char* function, const char* name, const std::int32_t* places,
                  std::int64_t count, std::int64_t end, Device device, std::int32_t least = 0) {
  if (!places || device != Device::kCpu) return;  // those of a GPU are not copied to the host
  for (std::int64_t i = 0; i < count; ++i)
    MINIFLOAT_CHECK(least <= places[i] && places[i] < end, function, ": expected ", name, " of ",
                    least, " to ", end - 1, ", got ", places[i], " at ", i);
}

void check_swiglu(const char* function, const SwiGlu& of) {
  check_device(function, of.device);
  MINIFLOAT_CHECK(of.rows >= 0 && of.width >= 0 && is_addressable({of.rows, of.width}), function,
                  ": expected rows and columns of at most 2^48 elements, got ", of.rows, " and ",
                  of.width);
  MINIFLOAT_CHECK(of.activation == Activation::kSilu || !(of.has_limit || of.is_interleaved),
                  function, ": expected gate and up apart and no limit of another activation");
  check_group_table(function, of.groups, of.device, 0, of.rows);
  check_places(function, "places", of.places, of.rows, of.rows, of.device);
}

// Requires gate and up of a dense layer.
void check_dense(const char* function, const SwiGlu& of) {
  check_swiglu(function, of);
  MINIFLOAT_CHECK(!of.groups && !of.weights && !of.has_limit && !of.is_interleaved, function,
                  ": expected gate and up apart, without groups, weights and a limit");
}

}  // namespace

void swiglu(const SwiGlu& of, void* h, const Execution& execution) {
  check_swiglu("swiglu", of);
  if (of.rows * of.width == 0) return;
  MINIFLOAT_ON(of.device, swiglu(of, h, execution));
}

void quantize_swiglu(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution) {
  check_swiglu("quantize_swiglu", of);
  check_quantize(of.h_at(of.gate), rowwise, columnwise);
  if (of.rows * of.width == 0)  // groups without rows have columns of zeros
    return quantize(of.h_at(of.gate), rowwise, columnwise, execution);
  MINIFLOAT_ON(of.device, quantize_swiglu(of, rowwise, columnwise, execution));
}

void swiglu_backward(const SwiGlu& of, const SwiGluGradients& gradients,
                     const Execution& execution) {
  check_swiglu("swiglu_backward", of);
  MINIFLOAT_CHECK(of.groups || !gradients.of_gate,
                  "swiglu_backward: expected groups of rows where amaxes are found, got none");
  if (of.rows == 0 && !gradients.of_gate) return;
  MINIFLOAT_ON(of.device, swiglu_backward(of, gradients, execution));
}

void swiglu_backward_with_amaxes(const SwiGlu& of, const SwiGluGradients& gradients, float* amaxes,
                                 int count, const Operand* h_col, const Execution& execution) {
  check_dense("swiglu_backward_with_amaxes", of);
  const TensorRef x = of.h_at(of.gate);
  if (h_col) check_quantize(x, nullptr, h_col);
  if (of.rows * of.width == 0) {
    for (int i = 0; i < count; ++i) amax(x, {kWholeTensor}, amaxes + i, execution);
    if (h_col) quantize(x, nullptr, h_col, execution);
    return;
  }
  MINIFLOAT_CHECK(count == (of.up ? 2 : 1),
                  "swiglu_backward_with_amaxes: expected an amax of each gradient, got ", count);
  MINIFLOAT_ON(of.device,
               swiglu_backward_with_amaxes(of, gradients, amaxes, count, h_col, execution));
}

void quantize_swiglu_backward(const SwiGlu& of, const void* dh, std::int64_t dh_stride,
                              const SwiGluCasts& casts, const Execution& execution) {
  constexpr const char* kFunction = "quantize_swiglu_backward";
  check_dense(kFunction, of);
  const bool casts_up = casts.up_row || casts.up_col, is_empty = of.rows * of.width == 0;
  MINIFLOAT_CHECK(is_empty || casts_up == (of.up != nullptr), kFunction,
                  ": expected casts of the gradient of up, where that is not ones");
  const TensorRef x = of.h_at(of.gate);  // all have its shape
  check_quantize(x, casts.gate_row, casts.gate_col);
  if (casts_up) check_quantize(x, casts.up_row, casts.up_col);
  if (casts.h_col) check_quantize(x, nullptr, casts.h_col);
  if (is_empty) {
    quantize(x, casts.gate_row, casts.gate_col, execution);
    if (casts_up) quantize(x, casts.up_row, casts.up_col, execution);
    if (casts.h_col) quantize(x, nullptr, casts.h_col, execution);
    return;
  }
  MINIFLOAT_ON(of.device, quantize_swiglu_backward(of, dh, dh_stride, casts, execution));
}

void take_rows(const TakeRows& copy, const Execution& execution) {
  check_device("take_rows", copy.device);
  MINIFLOAT_CHECK(1 <= copy.slots && copy.slots < (std::int64_t{1} << 31),
                  "take_rows: expected 1 to 2^31 - 1 slots, got ", copy.slots);
  MINIFLOAT_CHECK(is_addressable({copy.rows, copy.row_bytes}) &&
                      is_addressable({copy.from_rows, copy.row_bytes}),
                  "take_rows: expected rows of at most 2^48 bytes in all, got ", copy.from_rows,
                  " of ", copy.row_bytes, " for ", copy.rows);
  if (copy.rows * copy.row_bytes == 0) return;
  // The numbers in index are below 2^31, so rows of `from` beyond have none.
  const std::int64_t numbers = std::min(copy.from_rows, std::int64_t{1} << 31) * copy.slots;
  MINIFLOAT_CHECK(!copy.places || copy.rows == numbers, "take_rows: expected places of ", copy.rows,
                  " rows, got ", copy.from_rows, " of ", copy.slots, " slots");
  check_places("take_rows", "rows", copy.index, copy.rows, numbers, copy.device);
  MINIFLOAT_ON(copy.device, take_rows(copy, execution));
}

RowLayout::RowLayout(const std::vector<std::int64_t>& field_bytes) {
  constexpr std::int64_t kField = 4, kRow = 16;
  for (const std::int64_t bytes : field_bytes) {
    begins.push_back(round_up(row_bytes, kField));
    row_bytes = begins.back() + bytes;
  }
  row_bytes = round_up(row_bytes, kRow);
}

RowLayout PackRows::layout() const {
  std::vector<std::int64_t> bytes;
  for (const RowField& field : fields) bytes.push_back(field.bytes);
  return RowLayout(bytes);
}

void pack_rows(const PackRows& pack, const Execution& execution) {
  check_device("pack_rows", pack.device);
  MINIFLOAT_CHECK(pack.fields.size() <= kMaxRowFields, "pack_rows: expected at most ",
                  kMaxRowFields, " fields, got ", pack.fields.size());
  for (const RowField& field : pack.fields) {
    MINIFLOAT_CHECK(
        is_addressable({pack.rows, field.bytes}) && is_addressable({field.from_rows, field.bytes}),
        "pack_rows: expected rows of at most 2^48 bytes in all, got ", field.from_rows, " of ",
        field.bytes, " for ", pack.rows);
    MINIFLOAT_CHECK(0 <= field.slots && field.slots < (std::int64_t{1} << 31),
                    "pack_rows: expected 0 to 2^31 - 1 slots, got ", field.slots);
    MINIFLOAT_CHECK(field.slots == 0 || pack.index || pack.from_rows == 0,
                    "pack_rows: expected an index of a field with slots, got none");
    MINIFLOAT_CHECK(field.slots != 0 || field.from_rows == pack.from_rows,
                    "pack_rows: expected fields of ", pack.from_rows, " rows, got ",
                    field.from_rows);
    // The numbers in index are below 2^31, so rows of `from` beyond have none.
    const std::int64_t numbers = std::min(field.from_rows, std::int64_t{1} << 31) * field.slots;
    if (field.slots != 0)
      check_places("pack_rows", "rows", pack.index, pack.from_rows, numbers, pack.device);
  }
  MINIFLOAT_CHECK(pack.rows_from || pack.rows == pack.from_rows, "pack_rows: expected ",
                  pack.from_rows, " rows, got ", pack.rows);
  check_places("pack_rows", "rows_from", pack.rows_from, pack.rows, pack.from_rows, pack.device,
               /*least=*/-1);
  if (pack.rows == 0 || pack.fields.empty()) return;
  MINIFLOAT_ON(pack.device, pack_rows(pack, execution));
}

void add_slots(const AddSlots& sum, const Execution& execution) {
  check_device("add_slots", sum.device);
  MINIFLOAT_CHECK(is_addressable({sum.tokens, sum.cols}) && is_addressable({sum.count, sum.cols}) &&
                      is_addressable({sum.tokens, sum.slots}),
                  "add_slots: expected at most 2^48 elements, got ", sum.tokens, " sums of ",
                  sum.slots, " rows of ", sum.count, ", of ", sum.cols, " columns");
  if (sum.tokens * sum.cols == 0) return;
  check_places("add_slots", "places", sum.places, sum.tokens * sum.slots, sum.count, sum.device,
               /*least=*/-1);
  MINIFLOAT_ON(sum.device, add_slots(sum, execution));
}

}  // namespace minifloat

// Calls that read values: amax, quantize, hadamard, quantize_messages; and what other files' calls
// share with them.
#include <algorithm>

#include "fuzz/casts.h"
#include "minifloat/messages.h"
#include "minifloat/transform.h"

namespace minifloat::fuzz {

Spec draw_spec(Draws& draw) {
  return Spec::parse(draw.one_of<const char*>(
      {"e4m3/tensor", "e5m2/tensor+delayed", "e4m3/row", "e4m3/row+exact+rht", "e4m3/1x128",
       "e4m3/128x128", "mxfp8", "mxfp8/e5m2+sr", "mxfp8/32x32", "mxfp4", "mxfp4+floor+rht32",
       "nvfp4", "nvfp4/16x16+4over6", "nvfp4+sr+rht", "nvfp4+pow2", "nvfp4+eden"}));
}

void spoil_spec(Call& call, Spec& spec) {
  call.choice("elements", spec.elements);
  call.choice("rule", spec.rule);
  call.choice("scale rounding", spec.scale_rounding);
  for (const int bad : {-1, 17, INT32_MIN, INT32_MAX}) {
    call.fault("block_rows", [&spec, bad] { spec.block_rows = bad; });
    call.fault("block_cols", [&spec, bad] { spec.block_cols = bad; });
    call.fault("transform", [&spec, bad] { spec.transform = bad; });
  }
}

void add_groups(Call& call, GroupTable& groups, std::int64_t rows) {
  const std::int64_t count = call.draw.below(4);
  auto* const table = call.memory<std::int32_t>(kGroupTableRows * (count + 1));
  std::vector<std::int32_t> ends(static_cast<std::size_t>(count) + 1);
  for (std::int32_t& end : ends) end = static_cast<std::int32_t>(call.draw.below(rows + 1));
  std::sort(ends.begin(), ends.end());
  build_group_table(ends.data(), count, rows, table, Device::kCpu, {});
  groups.count = static_cast<int>(count);
  const std::int32_t* const_table = table;
  call.place("the groups", groups.table, const_cast<std::int32_t*>(const_table),
             kGroupTableRows * (count + 1) * 4, 4, count == 0, false);
  call.fault("groups -1", [&groups] { groups.count = -1; });
  call.fault("groups 1 << 20", [&groups] { groups.count = 1 << 20; });
  for (const int unit : {-1, 24, 256})
    call.fault("unit " + std::to_string(unit), [&groups, unit] { groups.unit = unit; });
  call.fault("groups that begin past 0", [table] { table[0] = 1; });
  if (count > 0) {
    call.fault("groups that fall", [table] { table[1] = -5; });
    call.fault("groups past the rows",
               [table, count, rows] { table[count] = static_cast<std::int32_t>(rows + 7); });
  }
}

void add_values(Call& call, TensorRef& x, Values values) {
  Draws& draw = call.draw;
  x.dtype = draw.one_in(2) ? DType::kFloat32 : DType::kBFloat16;
  x.rows = draw.size(), x.cols = draw.size();
  const bool has_groups = values == Values::kAny && draw.one_in(3);
  x.batch = has_groups || values == Values::kMatrix ? 1 : draw.below(3);
  x.row_stride = x.cols + draw.below(3);
  std::int64_t rows = x.rows;
  if (has_groups) {
    add_groups(call, x.groups, x.rows);
    x.groups.unit = 128;
    call.fault("a batch of groups", [&x] { x.batch = 2; });
    if (draw.one_in(2)) {
      rows = x.from_rows = 1 + draw.below(20);
      call.input("rows_from", x.rows_from, x.rows);
      call.fill_index("rows_from", x.rows_from, x.rows, 0, rows, x.groups.table[x.groups.count]);
      call.size("from_rows", x.from_rows);
      if (x.rows > 0) call.fault("from_rows 0", [&x] { x.from_rows = 0; });
      // Null is no fault: the rows then lie at their positions, as many as there are.
      std::erase_if(call.faults, [](const Fault& f) { return f.name == "rows_from null"; });
    }
  }
  const std::int64_t of_matrix = rows == 0 || x.cols == 0 ? 0 : (rows - 1) * x.row_stride + x.cols;
  x.batch_stride = of_matrix;
  call.input("x", x.data, x.batch * of_matrix, size_of(x.dtype));
  call.choice("dtype", x.dtype);
  call.choice("device", x.device);
  call.size("batch", x.batch);
  call.size("rows", x.rows);
  call.size("cols", x.cols);
  if (rows > 1 && x.cols > 0) call.fault("rows that overlap", [&x] { x.row_stride = x.cols - 1; });
  if (x.batch * x.cols > 0) call.stride("row_stride", x.row_stride, rows);
  if (of_matrix > 0) call.stride("batch_stride", x.batch_stride, x.batch);
}

void add_operand(Call& call, const TensorRef& x, Operand& to, bool columnwise) {
  Draws& draw = call.draw;
  const Spec spec = to.spec;
  const bool is_grouped_columnwise = x.groups && columnwise;
  const std::int64_t rows = columnwise ? x.cols : x.rows,
                     cols = is_grouped_columnwise
                                ? grouped_cols<std::int64_t>(x.rows, x.groups.unit, x.groups.count)
                            : columnwise ? x.rows
                                         : x.cols;
  const std::int64_t parts = x.groups ? x.groups.count : x.batch,
                     line_rows = (is_grouped_columnwise ? parts : x.batch) * rows;
  to.as_fp8 = spec.is_fp4_by_powers_of_two() && draw.one_in(3);
  const std::int64_t code_bytes =
      x.batch * rows * (to.as_fp8 ? spec.padded_cols(cols) : spec.code_cols(cols));
  const std::int64_t amaxes = spec.has_row_amax() ? line_rows : spec.has_tensor_amax() ? parts : 0;
  const std::int64_t scales = to.as_fp8           ? 4 * line_rows
                              : spec.has_blocks() ? x.batch * spec.scale_rows(rows) *
                                                        spec.scale_cols(cols) * spec.scale_bytes()
                                                  : 4 * amaxes;
  const bool has_values = !to.as_fp8 && draw.one_in(2);
  if (has_values) {
    call.output("decoded", to.decoded, x.batch * rows * spec.padded_cols(cols), true);
  }
  call.output("codes", to.codes, code_bytes, to.decoded != nullptr);
  call.output("scale", to.scale, scales, 1);
  if (amaxes > 0) call.output("amax", to.amax, amaxes, true);
  if ((amaxes > 0 && draw.one_in(2)) || spec.delayed)
    call.input("given_amax", to.given_amax, amaxes, true);
  if (spec.delayed && to.given_amax && !to.amax && draw.one_in(2)) {
    to.history.stride = 3;
    call.output("history", to.history.first, parts * 3, true);
    if (parts > 1) call.fault("history stride 0", [&to] { to.history.stride = 0; });
    call.stride("history stride", to.history.stride, parts);
  }
  if (spec.has_row_amax() && spec.transform == 0 && !columnwise)
    call.output("amaxes_of_columns", to.amaxes_of_columns, parts * x.cols, true);
  if (spec.stochastic) {
    to.random.state_size = static_cast<int>(2 + draw.below(2));
    call.input("random state", to.random.state, to.random.state_size);
    call.fault("random state of 4", [&to] { to.random.state_size = 4; });
    if (x.groups && !columnwise) call.input("row ids", to.random.row_ids, x.rows, true);
    call.fault("origin", [&to] { to.origin.row = std::int64_t{1} << 33; });
    call.fault("origin off a multiple", [&to] { to.origin.col = 8; });
  }
  call.fault("origin below zero", [&to] { to.origin.col = -16; });
  if (!columnwise && spec.has_blocks() && to.row_bytes == 0)
    call.fault("row_bytes 1",
               [&to, is_row = code_bytes > x.rows] { to.row_bytes = is_row ? 1 : -1; });
  spoil_spec(call, to.spec);
}

namespace {

// Returns a spec that takes x: no blocks of several rows in groups.
Spec spec_for(Draws& draw, const TensorRef& x) {
  Spec spec = draw_spec(draw);
  while (x.groups && spec.has_blocks_2d()) spec = draw_spec(draw);
  return spec;
}

Call amax_call(Draws& draw) {
  Call call("amax", draw);
  auto& x = call.object<TensorRef>();
  auto& of = call.object<AmaxOf>();
  float*& out = call.object<float*>();
  add_values(call, x, Values::kAny);
  do of.spec = spec_for(draw, x);
  while (!of.spec.has_tensor_amax() && !of.spec.has_row_amax());
  of.columnwise = draw.one_in(2);
  if (of.spec.is_eden()) {
    of.random.state_size = 2;
    call.input("random state", of.random.state, 2);
    call.fault("random state of 1", [&of] { of.random.state_size = 1; });
  }
  const std::int64_t parts = x.groups ? x.groups.count : x.batch;
  const std::int64_t rows = !of.columnwise ? x.batch * x.rows : parts * x.cols;
  call.output("out", out, of.spec.has_row_amax() ? rows : parts);
  spoil_spec(call, of.spec);
  call.run = [&] { amax(x, of, out); };
  return call;
}

Call quantize_call(Draws& draw) {
  Call call("quantize", draw);
  auto& x = call.object<TensorRef>();
  auto& row = call.object<Operand>();
  auto& col = call.object<Operand>();
  add_values(call, x, Values::kAny);
  const std::int64_t directions = draw.below(3);
  if (directions != 1) row.spec = spec_for(draw, x), add_operand(call, x, row, false);
  if (directions != 0) col.spec = spec_for(draw, x), add_operand(call, x, col, true);
  const Operand*& to_row = call.object<const Operand*>(directions != 1 ? &row : nullptr);
  const Operand*& to_col = call.object<const Operand*>(directions != 0 ? &col : nullptr);
  call.fault("no direction", [&] { to_row = to_col = nullptr; });
  call.run = [&] { quantize(x, to_row, to_col); };
  return call;
}

// Rows of codes and scales that lie apart in one memory, or in two.
Call pitched_call(Draws& draw) {
  Call call("quantize by row_bytes", draw);
  auto& x = call.object<TensorRef>();
  auto& row = call.object<Operand>();
  add_values(call, x, Values::kMatrix);
  row.spec = Spec::parse(draw.one_of<const char*>({"mxfp8", "e4m3/1x128", "mxfp4"}));
  const std::int64_t codes = row.spec.code_cols(x.cols), begin = (codes + 15) / 16 * 16,
                     scales = row.spec.scale_cols(x.cols) * row.spec.scale_bytes();
  row.row_bytes = begin + (scales + 15) / 16 * 16;
  auto* const memory = call.memory<std::uint8_t>(x.rows * row.row_bytes);
  row.codes = memory;
  row.scale = memory + begin;
  if (x.rows * x.cols > 0) {
    call.fault("codes null", [&row] { row.codes = nullptr; });
    call.fault("scale null", [&row] { row.scale = nullptr; });
    call.fault("scale at the codes", [&row] { row.scale = row.codes; });
    if (codes > 1)
      call.fault("row_bytes below a row", [&row, codes] { row.row_bytes = codes - 1; });
    if (x.rows > 1)
      call.fault("row_bytes past all memory", [&row] { row.row_bytes = INT64_MAX / 16 * 16; });
  }
  call.run = [&] { quantize(x, &row, nullptr); };
  return call;
}

Call hadamard_call(Draws& draw) {
  Call call("hadamard", draw);
  auto& x = call.object<TensorRef>();
  int& points = call.object<int>(draw.one_of({16, 32, 64, 128}));
  auto& signs = call.object<std::uint32_t>(0x1234);
  bool& columnwise = call.object<bool>(draw.one_in(2));
  std::uint16_t*& out = call.object<std::uint16_t*>();
  add_values(call, x, Values::kAny);
  const std::int64_t cols = !columnwise ? x.cols
                            : x.groups  ? grouped_cols<std::int64_t>(x.rows, 128, x.groups.count)
                                        : x.rows;
  call.output("out", out,
              x.batch * (columnwise ? x.cols : x.rows) * round_up<std::int64_t>(cols, points));
  for (const int bad : {-16, 0, 48, 256}) call.fault("points", [&points, bad] { points = bad; });
  call.fault("signs", [&signs] { signs = 1u << 16; });
  call.run = [&] { hadamard(x, points, columnwise, signs, out); };
  return call;
}

Call message_call(Draws& draw) {
  Call call("quantize_messages", draw);
  auto& x = call.object<TensorRef>();
  auto& spec = call.object<Spec>(
      Spec::parse(draw.one_of<const char*>({"mxfp8", "e4m3/1x128", "mxfp4", "mxfp8/e5m2+sr"})));
  auto& random = call.object<Random>();
  std::uint8_t*& messages = call.object<std::uint8_t*>();
  add_values(call, x, Values::kMatrix);
  if (spec.stochastic && x.cols > 0) {
    random.state_size = 2;
    call.input("random state", random.state, 2, x.rows == 0);
  }
  call.output("messages", messages, x.rows * message_layout(spec, x.cols).bytes);
  spoil_spec(call, spec);
  call.run = [&] { quantize_messages(x, spec, random, messages); };
  return call;
}

}  // namespace

const std::vector<MakeCall> kCastCalls = {amax_call,    quantize_call, quantize_call, quantize_call,
                                          pitched_call, hadamard_call, message_call};

}  // namespace minifloat::fuzz

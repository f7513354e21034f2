// Calls that read values: amax, quantize, hadamard, quantize_messages; and what other files' calls
// share with them.
#include <algorithm>

#include "fuzz/call.h"
#include "minifloat/core/swizzle.h"
#include "minifloat/messages.h"
#include "minifloat/transform.h"

namespace minifloat::fuzz {

Spec Draws::spec() {
  return spec_of({"e4m3/tensor", "e5m2/tensor+delayed", "e4m3/row", "e4m3/row+exact+rht",
                  "e4m3/1x128", "e4m3/128x128", "mxfp8", "mxfp8/e5m2+sr", "mxfp8/32x32", "mxfp4",
                  "mxfp4+floor+rht32", "nvfp4", "nvfp4/16x16+4over6", "nvfp4+sr+rht", "nvfp4+pow2",
                  "nvfp4+eden", "e4m3/1x128+exact", "e4m3/128x128+exact", "nvfp4/row+sr"});
}
Spec Draws::spec(const TensorRef& x) {
  Spec found = spec();
  while (x.groups && found.has_blocks_2d()) found = spec();
  return found;
}

void Call::spoil_spec(Spec& spec) {
  wrong("elements, rule, scale rounding", spec.elements, spec.rule, spec.scale_rounding);
  bad("block_rows", spec.block_rows, {-1, 17, INT32_MIN, INT32_MAX});
  bad("block_cols", spec.block_cols, {-1, 17, INT32_MIN, INT32_MAX});
  bad("transform", spec.transform, {-1, 17, INT32_MIN, INT32_MAX});
}

void Call::groups(GroupTable& groups, std::int64_t rows) {
  const std::int64_t count = below(4);
  std::int32_t* table = nullptr;
  std::vector<std::int32_t> ends(static_cast<std::size_t>(count) + 1);
  for (std::int32_t& end : ends) end = static_cast<std::int32_t>(below(rows + 1));
  std::sort(ends.begin(), ends.end());
  input("the groups", groups.table, kGroupTableRows * (count + 1));
  if (count == 0) drop("the groups null");  // none
  table = const_cast<std::int32_t*>(groups.table);
  build_group_table(ends.data(), count, rows, table, Device::kCpu, {});
  groups.count = static_cast<int>(count);
  bad("groups", groups.count, {-1, 1 << 20});
  bad("unit", groups.unit, {-1, 24, 256});
  bad("groups that begin past 0", table[0], {1});
  if (count == 0) return;
  bad("groups that fall", table[1], {-5});
  bad("groups past the rows", table[count], {static_cast<std::int32_t>(rows + 7)});
}

void add_values(Call& call, TensorRef& x, Values values) {
  x.dtype = call.dtype(), x.rows = call.length(), x.cols = call.length();
  const bool has_groups = values == Values::kAny && call.one_in(3);
  x.batch = has_groups || values == Values::kMatrix ? 1 : call.below(3);
  x.row_stride = x.cols + call.below(3);
  std::int64_t rows = x.rows;
  if (has_groups) {
    call.groups(x.groups, x.rows);
    const std::int64_t read = x.groups.table[x.groups.count];
    rows = std::min(rows, std::max<std::int64_t>(read, 1));
    x.groups.unit = 128;
    call.bad("a batch of groups", x.batch, {2});
    if (call.one_in(2)) {
      rows = x.from_rows = 1 + call.below(20);
      call.input("rows_from", x.rows_from, x.rows);
      call.fill_index("rows_from with", x.rows_from, x.rows, 0, rows, read);
      call.wrong("from_rows", x.from_rows);
      if (x.rows > 0) call.bad("from_rows", x.from_rows, {0});
      call.drop("rows_from null");  // the rows then lie at their positions, as many as there are
    }
  }
  const std::int64_t of_matrix = rows == 0 || x.cols == 0 ? 0 : (rows - 1) * x.row_stride + x.cols;
  x.batch_stride = of_matrix;
  call.input("x", x.data, x.batch * of_matrix, size_of(x.dtype));
  call.wrong("dtype, device, batch, rows, cols", x.dtype, x.device, x.batch, x.rows, x.cols);
  if (rows > 1 && x.cols > 0) call.bad("rows that overlap", x.row_stride, {x.cols - 1});
  if (x.batch * x.cols > 0) call.stride("row_stride", x.row_stride, rows);
  if (of_matrix > 0) call.stride("batch_stride", x.batch_stride, x.batch);
}

void add_operand(Call& call, const TensorRef& x, Operand& to, bool columnwise) {
  const Spec spec = to.spec;
  const bool is_grouped_columnwise = x.groups && columnwise;
  const std::int64_t rows = columnwise ? x.cols : x.rows,
                     cols = is_grouped_columnwise
                                ? grouped_cols<std::int64_t>(x.rows, x.groups.unit, x.groups.count)
                            : columnwise ? x.rows
                                         : x.cols;
  const std::int64_t parts = x.groups ? x.groups.count : x.batch,
                     line_rows = (is_grouped_columnwise ? parts : x.batch) * rows;
  to.as_fp8 = spec.is_fp4_by_powers_of_two() && call.one_in(3);
  const std::int64_t code_bytes =
      x.batch * rows * (to.as_fp8 ? spec.padded_cols(cols) : spec.code_cols(cols));
  const std::int64_t amaxes = spec.has_row_amax() ? line_rows : spec.has_tensor_amax() ? parts : 0;
  const bool may_swizzle = spec.has_blocks() && spec.scale_bytes() == 1 && !to.as_fp8 && !x.groups;
  to.swizzled = may_swizzle && call.one_in(3);
  const std::int64_t scales = to.as_fp8     ? 4 * line_rows
                              : to.swizzled ? x.batch * swizzled_size(rows, spec.scale_cols(cols))
                              : spec.has_blocks() ? x.batch * spec.scale_rows(rows) *
                                                        spec.scale_cols(cols) * spec.scale_bytes()
                                                  : 4 * amaxes;
  if (!to.as_fp8 && !spec.has_fp32_values() && call.one_in(2))
    call.optional("decoded", to.decoded, x.batch * rows * spec.padded_cols(cols));
  call.output("codes", to.codes, code_bytes);
  if (to.decoded) call.drop("codes null");  // the values alone
  call.output("scale", to.scale, scales, 1);
  if (amaxes > 0) call.optional("amax", to.amax, amaxes);
  if ((amaxes > 0 && call.one_in(2)) || spec.delayed)
    call.optional("given_amax", to.given_amax, amaxes);
  if (spec.delayed && to.given_amax && !to.amax && call.one_in(2)) {
    to.history.stride = 3;
    call.output("history", to.history.first, parts == 0 ? 0 : (parts - 1) * 3 + 1);
    call.drop("history null");  // no history
    if (parts > 1) call.bad("history stride", to.history.stride, {0});
    call.stride("history stride", to.history.stride, parts);
  }
  if (spec.has_row_amax() && spec.transform == 0 && !columnwise)
    call.optional("amaxes_of_columns", to.amaxes_of_columns, parts * x.cols);
  if (spec.stochastic) {
    to.random.state_size = static_cast<int>(2 + call.below(2));
    call.input("random state", to.random.state, to.random.state_size);
    call.bad("random state of", to.random.state_size, {-1, 1, 4});
    if (x.groups && !columnwise) call.optional("row ids", to.random.row_ids, x.rows);
    call.bad("origin", to.origin.row, {std::int64_t{1} << 33});
    call.bad("origin off a multiple", to.origin.col, {8});
  }
  if (!may_swizzle) call.bad("swizzled scales", to.swizzled, {true});
  call.bad("origin below zero", to.origin.col, {-16});
  if (!columnwise && spec.has_blocks() && to.row_bytes == 0)
    call.bad("row_bytes", to.row_bytes, {code_bytes > x.rows ? 1 : -1});
  call.spoil_spec(to.spec);
}

void Directions::draw_casts(Call& call, const TensorRef& x) {
  const std::int64_t directions = call.below(3);
  if (directions != 1) row.spec = call.spec(x), add_operand(call, x, row, false), to_row = &row;
  if (directions != 0) col.spec = call.spec(x), add_operand(call, x, col, true), to_col = &col;
  call.fault("no direction", [this] { to_row = to_col = nullptr; });
}

namespace {

struct Amax : Named<"amax"> {
  TensorRef x;
  AmaxOf of;
  float* out;
  void draw(Call& call) {
    add_values(call, x, Values::kAny);
    do of.spec = call.spec(x);
    while (!of.spec.has_tensor_amax() && !of.spec.has_row_amax());
    of.columnwise = call.one_in(2);
    if (of.spec.is_eden()) {
      of.random.state_size = 2;
      call.input("random state", of.random.state, 2);
      call.bad("random state of", of.random.state_size, {1});
    }
    const std::int64_t parts = x.groups ? x.groups.count : x.batch;
    const std::int64_t rows = !of.columnwise ? x.batch * x.rows : parts * x.cols;
    call.output("out", out, of.spec.has_row_amax() ? rows : parts);
    call.spoil_spec(of.spec);
  }
  void run() const { amax(x, of, out); }
};
struct Quantize : Named<"quantize">, Directions {
  TensorRef x;
  void draw(Call& call) {
    add_values(call, x, Values::kAny);
    draw_casts(call, x);
  }
  void run() const { quantize(x, to_row, to_col); }
};

// Rows of codes and scales that lie apart in one memory.
struct QuantizeRows : Named<"quantize by row_bytes"> {
  TensorRef x;
  Operand row;
  void draw(Call& call) {
    add_values(call, x, Values::kMatrix);
    row.spec = call.spec_of({"mxfp8", "e4m3/1x128", "mxfp4"});
    const std::int64_t codes = row.spec.code_cols(x.cols), begin = (codes + 15) / 16 * 16,
                       scales = row.spec.scale_cols(x.cols) * row.spec.scale_bytes();
    row.row_bytes = begin + (scales + 15) / 16 * 16;
    auto* const memory = call.memory<std::uint8_t>(x.rows * row.row_bytes);
    row.codes = memory;
    row.scale = memory + begin;
    if (x.rows * x.cols == 0) return;
    call.bad("codes null", row.codes, {nullptr});
    call.bad("scale null", row.scale, {nullptr});
    call.bad("scale at the codes", row.scale, {row.codes});
    call.bad("codes at the scale", row.codes, {memory + begin});
    if (codes > 1) call.bad("row_bytes below a row", row.row_bytes, {codes - 1});
    call.bad("codes into the scale", row.codes, {memory + begin - codes + 1});
    if (x.rows > 1) call.bad("row_bytes past all memory", row.row_bytes, {INT64_MAX / 16 * 16});
  }
  void run() const { quantize(x, &row, nullptr); }
};
struct Hadamard : Named<"hadamard"> {
  TensorRef x;
  int points;
  std::uint32_t signs = 0x1234;
  bool columnwise;
  std::uint16_t* out;
  void draw(Call& call) {
    points = call.one_of({16, 32, 64, 128}), columnwise = call.one_in(2);
    add_values(call, x, Values::kAny);
    const std::int64_t cols = !columnwise ? x.cols
                              : x.groups  ? grouped_cols<std::int64_t>(x.rows, 128, x.groups.count)
                                          : x.rows;
    call.output("out", out,
                x.batch * (columnwise ? x.cols : x.rows) * round_up<std::int64_t>(cols, points));
    call.bad("points", points, {-16, 0, 48, 256});
    call.bad("signs", signs, {1u << 16});
  }
  void run() const { hadamard(x, points, columnwise, signs, out); }
};
struct QuantizeMessages : Named<"quantize_messages"> {
  TensorRef x;
  Spec spec;
  Random random;
  std::uint8_t* messages;
  void draw(Call& call) {
    spec = call.spec_of({"mxfp8", "e4m3/1x128", "mxfp4", "mxfp8/e5m2+sr"});
    add_values(call, x, Values::kMatrix);
    if (spec.stochastic && x.rows * x.cols > 0) {
      random.state_size = 2;
      call.input("random state", random.state, 2);
    }
    call.output("messages", messages, x.rows * message_layout(spec, x.cols).bytes);
    call.spoil_spec(spec);
  }
  void run() const { quantize_messages(x, spec, random, messages); }
};

}  // namespace

const std::vector<Function> kCasts =
    functions<Amax, Quantize, Quantize, Quantize, QuantizeRows, Hadamard, QuantizeMessages>();

}  // namespace minifloat::fuzz

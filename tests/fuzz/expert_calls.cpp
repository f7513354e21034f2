// Calls of what lies between the products of experts.
#include "minifloat/experts.h"

#include <algorithm>

#include "fuzz/call.h"

namespace minifloat::fuzz {
namespace {

// Returns the elements that rows of `cols` columns of a SwiGLU span.
std::int64_t span_of(std::int64_t rows, std::int64_t stride, std::int64_t cols) {
  return rows * cols == 0 ? 0 : (rows - 1) * stride + cols;
}
// Returns the rows before the last group's end, one at least: the others have no memory.
std::int64_t rows_read(const SwiGlu& of) {
  if (!of.groups) return of.rows;
  return std::min(of.rows, std::max<std::int64_t>(of.groups.table[of.groups.count], 1));
}

// Draws gate and up: apart, or (of fused ones) in turns.   is_dense: without groups and weights
void add_swiglu(Call& call, SwiGlu& of, bool is_dense) {
  of.rows = call.length(), of.width = call.length(), of.dtype = call.dtype();
  of.activation = call.one_of({Activation::kSilu, Activation::kGelu, Activation::kGeluTanh});
  of.is_interleaved = !is_dense && of.activation == Activation::kSilu && call.one_in(3);
  if (!is_dense && call.one_in(2)) call.groups(of.groups, of.rows);
  const std::int64_t size = size_of(of.dtype), rows = rows_read(of);
  if (of.is_interleaved) {
    of.gate_stride = of.up_stride = 2 * of.width + call.below(2);
    const std::int64_t elements = span_of(rows, of.gate_stride, 2 * of.width);
    auto* const memory = call.memory<std::uint8_t>(elements * size);
    of.gate = memory, of.up = memory + size;
    if (elements > 0) call.bad("gate null", of.gate, {nullptr});
  } else {
    of.gate_stride = of.width + call.below(3), of.up_stride = of.width + call.below(3);
    call.input("gate", of.gate, span_of(rows, of.gate_stride, of.width), size);
    if (!call.one_in(4)) call.input("up", of.up, span_of(rows, of.up_stride, of.width), size);
    call.drop("up null");  // ones
  }
  if (of.width > 0) call.stride("gate_stride", of.gate_stride, of.rows);
  if (!is_dense) {
    call.optional("weights", of.weights, of.rows);
    call.optional("places", of.places, of.rows);
    if (of.places) call.fill_index("places with", of.places, of.rows, 0, of.rows, of.rows);
    of.has_limit = of.activation == Activation::kSilu && call.one_in(3), of.limit = 7;
  } else {
    call.bad("weights of a dense layer", of.weights, {call.memory<float>(of.rows)});
  }
  call.wrong("activation, dtype, device, rows, width", of.activation, of.dtype, of.device, of.rows,
             of.width);
}

// Draws an operand of a cast of h, or of what has its shape.
void add_cast(Call& call, const SwiGlu& of, Operand& to, bool columnwise) {
  const TensorRef x = of.h_at(nullptr);
  to.spec = call.spec(x);
  add_operand(call, x, to, columnwise);
}

struct Swiglu : Named<"swiglu"> {
  SwiGlu of;
  void* h;
  void draw(Call& call) {
    add_swiglu(call, of, /*is_dense=*/false);
    call.output("h", h, of.rows * of.width, size_of(of.dtype));
  }
  void run() const { swiglu(of, h, {}); }
};
struct QuantizeSwiglu : Named<"quantize_swiglu">, Directions {
  SwiGlu of;
  void draw(Call& call) {
    add_swiglu(call, of, /*is_dense=*/false);
    of.groups.unit = of.groups ? 128 : 0;
    draw_casts(call, of.h_at(nullptr));
  }
  void run() const { quantize_swiglu(of, to_row, to_col); }
};

// Draws the gradients: gate's and up's apart, as halves of one matrix, or in turns.
void add_gradients(Call& call, const SwiGlu& of, SwiGluGradients& d) {
  const std::int64_t size = size_of(of.dtype);
  d.dh_stride = of.width + call.below(3);
  call.input("dh", d.dh, span_of(rows_read(of), d.dh_stride, of.width), size);
  const bool are_halves = of.up && !of.is_interleaved && call.one_in(2);
  if (of.is_interleaved || are_halves) {
    d.stride = 2 * of.width + call.below(2);
    call.output("d_gate", d.gate, span_of(of.rows, d.stride, 2 * of.width), size);
    d.up = static_cast<std::uint8_t*>(d.gate) + size * (of.is_interleaved ? 1 : of.width);
    call.drop("d_gate at an odd address");  // and then up is elsewhere too
  } else {
    d.stride = of.width + call.below(3);
    call.output("d_gate", d.gate, span_of(of.rows, d.stride, of.width), size);
    if (of.up) call.output("d_up", d.up, span_of(of.rows, d.stride, of.width), size);
  }
  if (of.rows * of.width == 0) return;
  if (of.rows > 1) call.bad("gradients that overlap", d.stride, {of.width - 1});
  if (of.rows > 1 && d.up && (of.is_interleaved || are_halves))
    call.bad("halves that overlap", d.stride, {2 * of.width - 1});
  if (d.up) call.bad("no gradient of up", d.up, {nullptr});
  call.stride("gradient stride", d.stride, of.rows);
  call.stride("dh_stride", d.dh_stride, of.rows);
}

struct SwigluBackward : Named<"swiglu_backward"> {
  SwiGlu of;
  SwiGluGradients d;
  void draw(Call& call) {
    add_swiglu(call, of, /*is_dense=*/false);
    add_gradients(call, of, d);
    call.optional("d_weights", d.weights, of.rows);
    if (of.groups && call.one_in(2)) {
      const auto* const behind = static_cast<std::uint8_t*>(d.gate) + of.width * size_of(of.dtype);
      const bool is_apart = d.up && !of.is_interleaved && d.up != behind;
      const std::int64_t cols = d.up && !is_apart ? 2 * of.width : of.width;
      call.output("rows of gate", d.of_gate.rows, of.rows);
      call.output("columns of gate", d.of_gate.columns, of.groups.count * cols);
      if (!is_apart) return;
      call.output("rows of up", d.of_up.rows, of.rows);
      call.output("columns of up", d.of_up.columns, of.groups.count * cols);
      if (of.rows * of.width > 0) call.bad("amaxes of no halves", d.of_up, {LineAmaxes{}});
    } else if (!of.groups) {
      auto* const at = call.memory<float>(1);
      call.bad("amaxes without groups", d.of_gate, {LineAmaxes{at, at}});
    }
  }
  void run() const { swiglu_backward(of, d, {}); }
};
struct BackwardWithAmaxes : Named<"swiglu_backward_with_amaxes"> {
  SwiGlu of;
  SwiGluGradients d;
  Operand h_col;
  float* amaxes;
  int count;
  bool has_cast;
  void draw(Call& call) {
    add_swiglu(call, of, /*is_dense=*/true);
    add_gradients(call, of, d);
    if (d.stride == d.dh_stride) call.drop("d_gate in the place of dh");  // legal
    count = of.up ? 2 : 1, has_cast = call.one_in(2);
    call.output("amaxes", amaxes, count);
    call.bad("count", count, {-1, 0, 3, INT32_MAX});
    if (has_cast) add_cast(call, of, h_col, true);
  }
  void run() const {
    swiglu_backward_with_amaxes(of, d, amaxes, count, has_cast ? &h_col : nullptr, {});
  }
};
struct QuantizeBackward : Named<"quantize_swiglu_backward"> {
  SwiGlu of;
  Operand operands[5];
  SwiGluCasts casts;
  const void* dh;
  std::int64_t stride;
  void draw(Call& call) {
    add_swiglu(call, of, /*is_dense=*/true);
    stride = of.width + call.below(3);
    call.input("dh", dh, span_of(of.rows, stride, of.width), size_of(of.dtype));
    if (of.width > 0) call.stride("dh_stride", stride, of.rows);
    const auto cast_to = [&](int i, const Operand*& to, bool columnwise) {
      add_cast(call, of, operands[i], columnwise);
      to = &operands[i];
    };
    if (call.one_in(2))
      cast_to(0, casts.gate_row, false);
    else
      cast_to(1, casts.gate_col, true);
    if (of.up) cast_to(2, casts.up_row, false), cast_to(3, casts.up_col, true);
    if (call.one_in(2)) cast_to(4, casts.h_col, true);
    call.fault("no casts of gate", [this] { casts.gate_row = casts.gate_col = nullptr; });
    if (of.up && of.rows * of.width > 0)
      call.fault("no casts of up", [this] { casts.up_row = casts.up_col = nullptr; });
  }
  void run() const { quantize_swiglu_backward(of, dh, stride, casts); }
};

// ---- Rows ---------------------------------------------------------------------------------------
struct Take : Named<"take_rows"> {
  TakeRows copy;
  void draw(Call& call) {
    copy.from_rows = 1 + call.below(9), copy.row_bytes = call.length();
    copy.from_stride = copy.row_bytes + call.below(3), copy.slots = 1 + call.below(3);
    const bool has_places = call.one_in(2);
    copy.rows = has_places ? copy.from_rows * copy.slots : call.length();
    const std::int64_t bytes = copy.rows * copy.row_bytes, rows = bytes == 0 ? 0 : copy.rows;
    call.input("from", copy.from,
               bytes == 0 ? 0 : span_of(copy.from_rows, copy.from_stride, copy.row_bytes), 1);
    call.input("index", copy.index, rows);
    call.fill_index("index with", copy.index, rows, 0, copy.from_rows * copy.slots, rows);
    if (has_places && bytes > 0) {
      call.optional("places", copy.places, copy.rows);
      if (copy.places && copy.rows > 1) call.bad("rows of other places", copy.rows, {rows - 1});
    }
    call.output("to", copy.to, bytes, 1);
    if (bytes > 0) call.stride("from_stride", copy.from_stride, copy.from_rows);
    call.wrong("device, from_rows, row_bytes, rows", copy.device, copy.from_rows, copy.row_bytes,
               copy.rows);
    call.bad("slots", copy.slots, {-1, 0, std::int64_t{1} << 31});
  }
  void run() const { take_rows(copy, {}); }
};
struct Pack : Named<"pack_rows"> {
  PackRows pack;
  void draw(Call& call) {
    pack.from_rows = 1 + call.below(9);
    const bool has_index = call.one_in(2);
    pack.fields.resize(static_cast<std::size_t>(1 + call.below(kMaxRowFields)));
    std::int64_t numbers = INT32_MAX;
    pack.rows = call.one_in(2) ? pack.from_rows : 1 + call.below(9);
    for (RowField& field : pack.fields) {
      field.slots = has_index ? call.below(3) : 0;
      field.from_rows = field.slots == 0 ? pack.from_rows : 1 + call.below(9);
      field.bytes = call.length(), field.from_stride = field.bytes + call.below(3);
      if (field.slots > 0) numbers = std::min(numbers, field.from_rows * field.slots);
      call.input("from", field.from, span_of(field.from_rows, field.from_stride, field.bytes), 1);
      if (field.bytes > 0) call.stride("from_stride", field.from_stride, field.from_rows);
      call.wrong("bytes, rows of a field", field.bytes, field.from_rows);
      call.bad("slots", field.slots, {-1, std::int64_t{1} << 31});
    }
    if (numbers < INT32_MAX) {
      call.input("index", pack.index, pack.from_rows);
      call.fill_index("index with", pack.index, pack.from_rows, 0, numbers, pack.from_rows);
    }
    if (pack.rows != pack.from_rows || call.one_in(2)) {
      call.input("rows_from", pack.rows_from, pack.rows);
      call.fill_index("rows_from with", pack.rows_from, pack.rows, -1, pack.from_rows, pack.rows);
      if (pack.rows == pack.from_rows) call.drop("rows_from null");  // its own rows
    }
    call.output("to", pack.to, pack.rows * pack.layout().row_bytes, 1);
    call.wrong("device, rows, from_rows", pack.device, pack.rows, pack.from_rows);
    call.fault("too many fields", [this] { pack.fields.resize(kMaxRowFields + 1); });
  }
  void run() const { pack_rows(pack, {}); }
};
struct Add : Named<"add_slots"> {
  AddSlots sum;
  void draw(Call& call) {
    sum.dtype = call.dtype();
    sum.count = 1 + call.below(9), sum.cols = call.length(), sum.stride = sum.cols + call.below(3);
    sum.tokens = call.length(), sum.slots = call.below(4);
    const std::int64_t size = size_of(sum.dtype), values = sum.tokens * sum.cols,
                       places = values == 0 ? 0 : sum.tokens * sum.slots;
    call.input("rows", sum.rows, values == 0 ? 0 : span_of(sum.count, sum.stride, sum.cols), size);
    call.input("places", sum.places, places);
    call.fill_index("places with", sum.places, places, -1, sum.count, places);
    call.optional("base", sum.base, values);
    call.output("to", sum.to, values, size);
    if (values > 0) call.stride("stride", sum.stride, sum.count);
    call.wrong("dtype, device, count, cols, tokens, slots", sum.dtype, sum.device, sum.count,
               sum.cols, sum.tokens, sum.slots);
  }
  void run() const { add_slots(sum, {}); }
};

}  // namespace

const std::vector<Function> kExperts =
    functions<Swiglu, QuantizeSwiglu, SwigluBackward, BackwardWithAmaxes, QuantizeBackward, Take,
              Pack, Add>();

}  // namespace minifloat::fuzz

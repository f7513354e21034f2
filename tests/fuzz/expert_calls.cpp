// Calls of what lies between the products of experts.
#include "minifloat/experts.h"

#include <algorithm>

#include "fuzz/casts.h"

namespace minifloat::fuzz {
namespace {

// Draws rows of `cols` columns of a SwiGLU. Returns the elements that they span.
std::int64_t span_of(const SwiGlu& of, std::int64_t stride, std::int64_t cols) {
  return of.rows * cols == 0 ? 0 : (of.rows - 1) * stride + cols;
}

// Draws gate and up: apart, or (of fused ones) in turns.   is_dense: without groups and weights
void add_swiglu(Call& call, SwiGlu& of, bool is_dense) {
  Draws& draw = call.draw;
  of.rows = draw.size(), of.width = draw.size();
  of.dtype = draw.one_of({DType::kFloat32, DType::kBFloat16});
  of.activation = draw.one_of({Activation::kSilu, Activation::kGelu, Activation::kGeluTanh});
  of.is_interleaved = !is_dense && of.activation == Activation::kSilu && draw.one_in(3);
  const std::int64_t size = size_of(of.dtype);
  if (of.is_interleaved) {
    of.gate_stride = of.up_stride = 2 * of.width + draw.below(2);
    const std::int64_t elements = span_of(of, of.gate_stride, 2 * of.width);
    auto* const memory = call.memory<std::uint8_t>(elements * size);
    of.gate = memory, of.up = memory + size;
    if (elements > 0) call.fault("gate null", [&of] { of.gate = nullptr; });
  } else {
    of.gate_stride = of.width + draw.below(3), of.up_stride = of.width + draw.below(3);
    call.input("gate", of.gate, span_of(of, of.gate_stride, of.width), size);
    if (draw.one_in(4))
      of.up = nullptr;
    else
      call.input("up", of.up, span_of(of, of.up_stride, of.width), size);
    std::erase_if(call.faults, [](const Fault& f) { return f.name == "up null"; });  // ones
  }
  if (of.width > 0) call.stride("gate_stride", of.gate_stride, of.rows);
  if (!is_dense) {
    call.input("weights", of.weights, of.rows, true);
    call.input("places", of.places, of.rows, true);
    if (of.places) call.fill_index("places", of.places, of.rows, 0, of.rows, of.rows);
    if (draw.one_in(2)) add_groups(call, of.groups, of.rows);
    of.has_limit = of.activation == Activation::kSilu && draw.one_in(3), of.limit = 7;
  } else {
    call.fault("weights of a dense layer",
               [&of, at = call.memory<float>(of.rows)] { of.weights = at; });
  }
  call.choice("activation", of.activation);
  call.choice("dtype", of.dtype);
  call.choice("device", of.device);
  call.size("rows", of.rows);
  call.size("width", of.width);
}

Call swiglu_call(Draws& draw) {
  Call call("swiglu", draw);
  auto& of = call.object<SwiGlu>();
  void*& h = call.object<void*>();
  add_swiglu(call, of, false);
  call.output("h", h, of.rows * of.width, size_of(of.dtype));
  call.run = [&] { swiglu(of, h, {}); };
  return call;
}

// Returns the shape of h for the operands of its casts.
TensorRef like_h(const SwiGlu& of) {
  TensorRef x = of.h_at(nullptr);
  return x;
}
Spec spec_of(Draws& draw, const SwiGlu& of) {
  Spec spec = draw_spec(draw);
  while (of.groups && spec.has_blocks_2d()) spec = draw_spec(draw);
  return spec;
}

Call quantize_swiglu_call(Draws& draw) {
  Call call("quantize_swiglu", draw);
  auto& of = call.object<SwiGlu>();
  auto& row = call.object<Operand>();
  auto& col = call.object<Operand>();
  add_swiglu(call, of, false);
  of.groups.unit = of.groups ? 128 : 0;
  const std::int64_t directions = draw.below(3);
  if (directions != 1) row.spec = spec_of(draw, of), add_operand(call, like_h(of), row, false);
  if (directions != 0) col.spec = spec_of(draw, of), add_operand(call, like_h(of), col, true);
  call.run = [&, directions] {
    quantize_swiglu(of, directions != 1 ? &row : nullptr, directions != 0 ? &col : nullptr);
  };
  return call;
}

// Draws the gradients: gate's and up's apart, as halves of one matrix, or in turns.
void add_gradients(Call& call, const SwiGlu& of, SwiGluGradients& d) {
  Draws& draw = call.draw;
  const std::int64_t size = size_of(of.dtype);
  d.dh_stride = of.width + draw.below(3);
  call.input("dh", d.dh, span_of(of, d.dh_stride, of.width), size);
  const bool are_halves = of.up && !of.is_interleaved && draw.one_in(2);
  if (of.is_interleaved || are_halves) {
    d.stride = 2 * of.width + draw.below(2);
    call.output("d_gate", d.gate, span_of(of, d.stride, 2 * of.width), size);
    d.up = static_cast<std::uint8_t*>(d.gate) + size * (of.is_interleaved ? 1 : of.width);
    std::erase_if(call.faults, [](const Fault& f) {
      return f.name == "d_gate at an odd address";  // and then up is elsewhere too
    });
  } else {
    d.stride = of.width + draw.below(3);
    call.output("d_gate", d.gate, span_of(of, d.stride, of.width), size);
    if (of.up) call.output("d_up", d.up, span_of(of, d.stride, of.width), size);
  }
  if (of.rows * of.width == 0) return;
  if (of.rows > 1) call.fault("gradients that overlap", [&d, &of] { d.stride = of.width - 1; });
  if (of.rows > 1 && d.up && (of.is_interleaved || are_halves))
    call.fault("halves that overlap", [&d, &of] { d.stride = 2 * of.width - 1; });
  if (d.up) call.fault("no gradient of up", [&d] { d.up = nullptr; });
  call.stride("gradient stride", d.stride, of.rows);
  call.stride("dh_stride", d.dh_stride, of.rows);
}

Call swiglu_backward_call(Draws& draw) {
  Call call("swiglu_backward", draw);
  auto& of = call.object<SwiGlu>();
  auto& d = call.object<SwiGluGradients>();
  add_swiglu(call, of, false);
  add_gradients(call, of, d);
  call.output("d_weights", d.weights, of.rows, true);
  if (of.groups && draw.one_in(2)) {
    const bool is_apart = d.up && !of.is_interleaved &&
                          d.up != static_cast<std::uint8_t*>(d.gate) + of.width * size_of(of.dtype);
    const std::int64_t cols = d.up && !is_apart ? 2 * of.width : of.width;
    call.output("rows of gate", d.of_gate.rows, of.rows);
    call.output("columns of gate", d.of_gate.columns, of.groups.count * cols);
    if (is_apart) {
      call.output("rows of up", d.of_up.rows, of.rows);
      call.output("columns of up", d.of_up.columns, of.groups.count * cols);
      if (of.rows * of.width > 0) call.fault("amaxes of no halves", [&d] { d.of_up = {}; });
    }
  } else if (!of.groups) {
    call.fault("amaxes without groups", [&d, at = call.memory<float>(1)] { d.of_gate = {at, at}; });
  }
  call.run = [&] { swiglu_backward(of, d, {}); };
  return call;
}

Call with_amaxes_call(Draws& draw) {
  Call call("swiglu_backward_with_amaxes", draw);
  auto& of = call.object<SwiGlu>();
  auto& d = call.object<SwiGluGradients>();
  auto& h_col = call.object<Operand>();
  float*& amaxes = call.object<float*>();
  add_swiglu(call, of, true);
  add_gradients(call, of, d);
  if (d.stride == d.dh_stride)  // gate's gradient may take dh's place
    std::erase_if(call.faults,
                  [](const Fault& f) { return f.name.ends_with("d_gate in the place of dh"); });
  int& count = call.object<int>(of.up ? 2 : 1);
  call.output("amaxes", amaxes, count);
  for (const int bad : {-1, 0, 3, INT32_MAX}) call.fault("count", [&count, bad] { count = bad; });
  const bool has_cast = draw.one_in(2);
  if (has_cast) h_col.spec = draw_spec(draw), add_operand(call, like_h(of), h_col, true);
  call.run = [&, has_cast] {
    swiglu_backward_with_amaxes(of, d, amaxes, count, has_cast ? &h_col : nullptr, {});
  };
  return call;
}

Call quantize_backward_call(Draws& draw) {
  Call call("quantize_swiglu_backward", draw);
  auto& of = call.object<SwiGlu>();
  auto& operands = call.object<std::vector<Operand>>(std::vector<Operand>(5));
  auto& casts = call.object<SwiGluCasts>();
  const void*& dh = call.object<const void*>();
  auto& stride = call.object<std::int64_t>();
  add_swiglu(call, of, true);
  stride = of.width + draw.below(3);
  call.input("dh", dh, span_of(of, stride, of.width), size_of(of.dtype));
  if (of.width > 0) call.stride("dh_stride", stride, of.rows);
  const auto cast_to = [&](std::size_t i, const Operand*& to, bool columnwise) {
    operands[i].spec = draw_spec(draw);
    add_operand(call, like_h(of), operands[i], columnwise);
    to = &operands[i];
  };
  if (draw.one_in(2))
    cast_to(0, casts.gate_row, false);
  else
    cast_to(1, casts.gate_col, true);
  if (of.up) cast_to(2, casts.up_row, false), cast_to(3, casts.up_col, true);
  if (draw.one_in(2)) cast_to(4, casts.h_col, true);
  call.fault("no casts of gate", [&casts] { casts.gate_row = casts.gate_col = nullptr; });
  if (of.up && of.rows * of.width > 0)
    call.fault("no casts of up", [&casts] { casts.up_row = casts.up_col = nullptr; });
  call.run = [&] { quantize_swiglu_backward(of, dh, stride, casts); };
  return call;
}

// ---- Rows ---------------------------------------------------------------------------------------
Call take_call(Draws& draw) {
  Call call("take_rows", draw);
  auto& copy = call.object<TakeRows>();
  copy.from_rows = 1 + draw.below(9), copy.row_bytes = draw.size();
  copy.from_stride = copy.row_bytes + draw.below(3), copy.slots = 1 + draw.below(3);
  const bool has_places = draw.one_in(2);
  copy.rows = has_places ? copy.from_rows * copy.slots : draw.size();
  const std::int64_t bytes = copy.rows * copy.row_bytes;
  call.input("from", copy.from,
             bytes == 0 ? 0 : (copy.from_rows - 1) * copy.from_stride + copy.row_bytes, 1);
  call.input("index", copy.index, bytes == 0 ? 0 : copy.rows);
  if (bytes > 0)
    call.fill_index("index", copy.index, copy.rows, 0, copy.from_rows * copy.slots, copy.rows);
  if (has_places && bytes > 0) {
    call.input("places", copy.places, copy.rows, true);
    if (copy.places && copy.rows > 1)
      call.fault("rows of other places", [&copy] { copy.rows -= 1; });
  }
  call.output("to", copy.to, bytes, 1);
  if (bytes > 0) call.stride("from_stride", copy.from_stride, copy.from_rows);
  call.choice("device", copy.device);
  call.size("from_rows", copy.from_rows);
  call.size("row_bytes", copy.row_bytes);
  call.size("rows", copy.rows);
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1} << 31})
    call.fault("slots", [&copy, bad] { copy.slots = bad; });
  call.run = [&] { take_rows(copy, {}); };
  return call;
}

Call pack_call(Draws& draw) {
  Call call("pack_rows", draw);
  auto& pack = call.object<PackRows>();
  pack.from_rows = 1 + draw.below(9);
  const bool has_index = draw.one_in(2);
  pack.fields.resize(static_cast<std::size_t>(1 + draw.below(kMaxRowFields)));
  std::int64_t numbers = INT32_MAX;
  pack.rows = draw.one_in(2) ? pack.from_rows : 1 + draw.below(9);
  for (RowField& field : pack.fields) {
    field.slots = has_index ? draw.below(3) : 0;
    field.from_rows = field.slots == 0 ? pack.from_rows : 1 + draw.below(9);
    field.bytes = draw.size(), field.from_stride = field.bytes + draw.below(3);
    if (field.slots > 0) numbers = std::min(numbers, field.from_rows * field.slots);
    call.input("from", field.from,
               field.bytes == 0 ? 0 : (field.from_rows - 1) * field.from_stride + field.bytes, 1);
    if (field.bytes > 0) call.stride("from_stride", field.from_stride, field.from_rows);
    call.size("bytes", field.bytes);
    call.size("rows of a field", field.from_rows);
    for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{1} << 31})
      call.fault("slots", [&field, bad] { field.slots = bad; });
  }
  if (numbers < INT32_MAX) {
    call.input("index", pack.index, pack.from_rows);
    call.fill_index("index", pack.index, pack.from_rows, 0, numbers, pack.from_rows);
  }
  if (pack.rows != pack.from_rows || draw.one_in(2)) {
    call.input("rows_from", pack.rows_from, pack.rows, pack.rows == pack.from_rows);
    if (pack.rows_from)
      call.fill_index("rows_from", pack.rows_from, pack.rows, -1, pack.from_rows, pack.rows);
    if (pack.rows == pack.from_rows)  // null then: its own rows
      std::erase_if(call.faults, [](const Fault& f) { return f.name == "rows_from null"; });
  }
  call.output("to", pack.to, pack.rows * pack.layout().row_bytes, 1);
  call.choice("device", pack.device);
  call.size("rows", pack.rows);
  call.size("from_rows", pack.from_rows);
  call.fault("too many fields", [&pack] { pack.fields.resize(kMaxRowFields + 1); });
  call.run = [&] { pack_rows(pack, {}); };
  return call;
}

Call add_call(Draws& draw) {
  Call call("add_slots", draw);
  auto& sum = call.object<AddSlots>();
  sum.dtype = draw.one_of({DType::kFloat32, DType::kBFloat16});
  sum.count = 1 + draw.below(9), sum.cols = draw.size(), sum.stride = sum.cols + draw.below(3);
  sum.tokens = draw.size(), sum.slots = draw.below(4);
  const std::int64_t size = size_of(sum.dtype), values = sum.tokens * sum.cols;
  call.input("rows", sum.rows, values == 0 ? 0 : (sum.count - 1) * sum.stride + sum.cols, size);
  const std::int64_t places = values == 0 ? 0 : sum.tokens * sum.slots;
  call.input("places", sum.places, places);
  call.fill_index("places", sum.places, places, -1, sum.count, places);
  call.input("base", sum.base, values, true);
  call.output("to", sum.to, values, size);
  if (values > 0) call.stride("stride", sum.stride, sum.count);
  call.choice("dtype", sum.dtype);
  call.choice("device", sum.device);
  call.size("count", sum.count);
  call.size("cols", sum.cols);
  call.size("tokens", sum.tokens);
  call.size("slots", sum.slots);
  call.run = [&] { add_slots(sum, {}); };
  return call;
}

}  // namespace

const std::vector<MakeCall> kExpertCalls = {swiglu_call,
                                            quantize_swiglu_call,
                                            swiglu_backward_call,
                                            with_amaxes_call,
                                            quantize_backward_call,
                                            take_call,
                                            pack_call,
                                            add_call};

}  // namespace minifloat::fuzz

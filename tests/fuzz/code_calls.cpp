// Calls that read codes, tables of groups, or what a model keeps from step to step.
#include <algorithm>

#include "fuzz/call.h"
#include "minifloat/amax_history.h"
#include "minifloat/group_checks.h"
#include "minifloat/grouped_product.h"
#include "minifloat/messages.h"
#include "minifloat/quantize.h"
#include "minifloat/random_state.h"
#include "minifloat/transform.h"

namespace minifloat::fuzz {
namespace {

// Draws an operand, perhaps in groups, with the memory that a cast would have written.
void add_quantized(Call& call, Quantized& q, bool is_as_fp8) {
  Draws& draw = call.draw;
  do q.spec = draw_spec(draw);
  while (is_as_fp8 && !q.spec.is_fp4_by_powers_of_two());
  const bool has_groups = !q.spec.has_blocks_2d() && draw.one_in(3), along_cols = draw.one_in(2);
  q.batch = has_groups ? 1 : draw.below(3);
  q.rows = draw.size(), q.cols = draw.size();
  std::int64_t scales = q.batch * q.rows;
  if (has_groups) {
    const std::int64_t grouped = along_cols ? q.cols : q.rows;
    add_groups(call, q.groups, grouped);
    if (along_cols) {
      q.groups.unit = 128;
      q.cols = grouped_cols<std::int64_t>(grouped, 128, q.groups.count);
      scales = q.groups.count * q.rows;
      // Groups that are legal among rows, but not among these columns, and the other way round.
      std::erase_if(call.faults, [](const Fault& f) { return f.name == "groups past the rows"; });
    }
    call.fault("a batch of groups", [&q] { q.batch = 2; });
  }
  const std::int64_t parts = has_groups ? q.groups.count : q.batch;
  if (q.spec.has_tensor_amax()) scales = parts;
  if (q.spec.has_blocks()) scales = q.batch * q.spec.scale_rows(q.rows) * q.spec.scale_cols(q.cols);
  const bool is_read = parts * q.rows * q.cols > 0;
  call.place("codes", q.codes,
             call.memory<std::uint8_t>(q.batch * q.rows * q.spec.code_cols(q.cols)),
             is_read ? 1 : 0, 1, false, false);
  call.place("scale", q.scale, call.memory<std::uint8_t>(scales * q.spec.scale_bytes()),
             is_read ? 1 : 0, q.spec.scale_bytes(), false, false);
  if (q.spec.rule == ScaleRule::kNvfp4) call.input("amax", q.amax, parts);
  call.choice("device", q.device);
  call.size("batch", q.batch);
  call.size("rows", q.rows);
  call.size("cols", q.cols);
  spoil_spec(call, q.spec);
}
// Drops the faults of what a call does not read.
void drop(Call& call, const char* name) {
  std::erase_if(call.faults, [&](const Fault& f) { return f.name.starts_with(name); });
}

std::int64_t values_of(const Quantized& q) {
  return (q.groups ? q.groups.count : q.batch) * q.rows * q.cols == 0
             ? 0
             : q.batch * q.rows * q.spec.padded_cols(q.cols);
}

Call dequantize_call(Draws& draw) {
  Call call("dequantize", draw);
  auto& q = call.object<Quantized>();
  auto& dtype = call.object<DType>(draw.one_of({DType::kFloat32, DType::kBFloat16}));
  void*& out = call.object<void*>();
  add_quantized(call, q, false);
  call.output("out", out, values_of(q), size_of(dtype));
  if (values_of(q) == 0) drop(call, "amax");
  call.choice("dtype", dtype);
  call.run = [&] { dequantize(q, dtype, out); };
  return call;
}
Call decode_call(Draws& draw) {
  Call call("decode_for_product", draw);
  auto& q = call.object<Quantized>();
  std::uint16_t*& out = call.object<std::uint16_t*>();
  add_quantized(call, q, false);
  call.output("out", out, values_of(q));
  drop(call, "amax"), drop(call, "out in the place of amax");
  call.run = [&] { decode_for_product(q, out); };
  return call;
}
Call factor_call(Draws& draw) {
  Call call("tensor_factor", draw);
  auto& q = call.object<Quantized>();
  float*& out = call.object<float*>();
  add_quantized(call, q, false);
  const std::int64_t parts = q.groups ? q.groups.count : q.batch;
  drop(call, "codes"), drop(call, "scale null"), drop(call, "scale at"), drop(call, "scale in");
  if (q.spec.rule == ScaleRule::kTensor) call.input("scale of parts", q.scale, parts, 4);
  float*& to = out;
  call.output("out", to, parts);
  drop(call, "out in the place of codes"), drop(call, "out in the place of scale");
  call.run = [&] { tensor_factor(q, out); };
  return call;
}
Call product_factor_call(Draws& draw) {
  Call call("product_factor", draw);
  auto& a = call.object<Quantized>();
  auto& b = call.object<Quantized>();
  float*& out = call.object<float*>();
  a.spec = Spec::parse("nvfp4"), b.spec = Spec::parse("e4m3/tensor");
  call.input("amax of a", a.amax, 1);
  call.input("scale of b", b.scale, 1, 4);
  call.output("out", out, 2);
  call.size("batch of a", a.batch);
  call.size("batch of b", b.batch);
  call.choice("device", b.device);
  spoil_spec(call, a.spec);
  call.run = [&] { product_factor(a, b, out); };
  return call;
}
Call as_fp8_call(Draws& draw) {
  Call call("fp4_as_fp8", draw);
  auto& casts = call.object<std::vector<Fp4AsFp8Cast>>(
      std::vector<Fp4AsFp8Cast>(static_cast<std::size_t>(1 + draw.below(2))));
  for (Fp4AsFp8Cast& cast : casts) {
    Quantized& q = cast.operand;
    add_quantized(call, q, true);
    const std::int64_t rows = (q.groups.unit > 0 ? q.groups.count : q.batch) * q.rows;
    call.output("codes out", cast.codes, q.batch * q.rows * q.spec.padded_cols(q.cols));
    call.output("row_scale", cast.row_scale, rows);
    call.fault("spec of FP8", [&q] { q.spec = Spec::parse("mxfp8"); });
  }
  call.run = [&] { fp4_as_fp8(casts); };
  return call;
}

// ---- Layouts ------------------------------------------------------------------------------------
template <bool kBack>
Call swizzle_call(Draws& draw) {
  Call call(kBack ? "unswizzle_scales" : "swizzle_scales", draw);
  auto& shape = call.object<ScaleMatrix>();
  const std::uint8_t*& in = call.object<const std::uint8_t*>();
  std::uint8_t*& out = call.object<std::uint8_t*>();
  shape.rows = draw.size(), shape.cols = draw.size(), shape.batch = draw.below(3);
  shape.kind = draw.one_of({ScaleGroups::kNone, ScaleGroups::kAlongM, ScaleGroups::kAlongK});
  if (shape.kind != ScaleGroups::kNone) {
    shape.batch = 1;
    shape.groups = draw.below(4);
    const std::int64_t length = shape.kind == ScaleGroups::kAlongM ? shape.rows : shape.cols;
    call.input("offsets", shape.offsets, shape.groups);
    call.fill_index("offsets", shape.offsets, shape.groups, 0, length + 1, shape.groups);
    auto* const ends = const_cast<std::int32_t*>(shape.offsets);
    std::sort(ends, ends + shape.groups);
    call.size("groups", shape.groups);
    call.fault("a batch of groups", [&shape] { shape.batch = 2; });
  }
  const std::int64_t plain = shape.batch * shape.rows * shape.cols,
                     swizzled = shape.batch * shape.swizzled_bytes();
  const bool is_read = (kBack ? plain : swizzled) > 0;
  call.input("scales in", in, is_read ? (kBack ? swizzled : plain) : 0);
  call.output("scales out", out, is_read ? (kBack ? plain : swizzled) : 0);
  call.choice("kind", shape.kind);
  call.choice("device", shape.device);
  call.size("batch", shape.batch);
  call.size("rows", shape.rows);
  call.size("cols", shape.cols);
  call.run = [&] { kBack ? unswizzle_scales(shape, in, out) : swizzle_scales(shape, in, out); };
  return call;
}
Call nibbles_call(Draws& draw) {
  Call call("transpose_nibbles", draw);
  auto& m = call.object<CodeMatrix>();
  std::uint8_t*& out = call.object<std::uint8_t*>();
  m.batch = draw.below(3), m.rows = draw.size(), m.cols = draw.size();
  const bool any = m.batch * m.rows * m.cols > 0;
  call.input("codes", m.codes, any ? m.batch * m.rows * ((m.cols + 1) / 2) : 0);
  call.output("out", out, any ? m.batch * m.cols * ((m.rows + 1) / 2) : 0);
  call.choice("device", m.device);
  call.size("batch", m.batch);
  call.size("rows", m.rows);
  call.size("cols", m.cols);
  call.run = [&] { transpose_nibbles(m, out); };
  return call;
}
Call sum_call(Draws& draw) {
  Call call("sum_messages", draw);
  auto& m = call.object<Messages>();
  auto& dtype = call.object<DType>(draw.one_of({DType::kFloat32, DType::kBFloat16}));
  void*& out = call.object<void*>();
  m.spec = Spec::parse(draw.one_of<const char*>({"bf16", "mxfp8", "e4m3/1x128", "mxfp4"}));
  m.ranks = 1 + draw.below(3), m.cols = draw.size();
  call.input("messages", m.data, m.ranks * message_layout(m.spec, m.cols).bytes);
  call.output("out", out, m.cols, size_of(dtype));
  call.choice("dtype", dtype);
  call.choice("device", m.device);
  call.size("ranks", m.ranks);
  call.size("cols", m.cols);
  spoil_spec(call, m.spec);
  call.run = [&] { sum_messages(m, dtype, out); };
  return call;
}

// ---- Groups -------------------------------------------------------------------------------------
Call build_table_call(Draws& draw) {
  Call call("build_group_table", draw);
  auto& groups = call.object<std::int64_t>(draw.below(5));
  auto& rows = call.object<std::int64_t>(draw.size());
  auto& device = call.object<Device>();
  const std::int32_t*& offs = call.object<const std::int32_t*>();
  std::int32_t*& table = call.object<std::int32_t*>();
  call.input("offs", offs, groups);  // any ends are legal
  call.output("table", table, kGroupTableRows * (groups + 1));
  call.size("groups", groups);
  call.size("rows", rows);
  call.choice("device", device);
  call.run = [&] { build_group_table(offs, groups, rows, table, device, {}); };
  return call;
}
Call check_table_call(Draws& draw) {
  Call call("check_group_table", draw);
  auto& groups = call.object<GroupTable>();
  auto& unit = call.object<int>(0);
  const std::int64_t rows = draw.size();
  add_groups(call, groups, rows);
  for (const int bad : {-16, 24, 256}) call.fault("read unit", [&unit, bad] { unit = bad; });
  call.run = [&, rows] { check_group_table("check", groups, Device::kCpu, unit, rows); };
  return call;
}
Call clear_call(Draws& draw) {
  Call call("clear_past_groups", draw);
  auto& groups = call.object<GroupTable>();
  auto& count = call.object<std::int64_t>(draw.size());
  auto& bytes = call.object<std::int64_t>(draw.size());
  auto& device = call.object<Device>();
  void*& rows = call.object<void*>();
  add_groups(call, groups, count);
  call.output("rows", rows, count * bytes, 1);
  call.size("count", count);
  call.size("row_bytes", bytes);
  call.choice("device", device);
  call.run = [&] { clear_past_groups(groups, rows, bytes, count, device, {}); };
  return call;
}
Call grouped_product_call(Draws& draw) {
  Call call("grouped_product", draw);
  auto& product = call.object<GroupedProduct>();
  call.is_legal = false;  // no memory, and on most machines no kernels
  call.run = [&] {
    has_grouped_kernel(product.a, product.b, true);
    grouped_product(product, {});
  };
  return call;
}

// ---- State --------------------------------------------------------------------------------------
Call roll_call(Draws& draw) {
  Call call("roll_amax_histories", draw);
  auto& h = call.object<AmaxHistories>();
  h.count = draw.below(4), h.length = static_cast<int>(1 + draw.below(5));
  h.algorithm = draw.one_of({DelayedAmax::kMax, DelayedAmax::kMostRecent});
  call.output("rows", h.rows, h.count * (1 + h.length));
  call.size("count", h.count);
  call.fault("length 0", [&h] { h.length = 0; });
  call.fault("length below zero", [&h] { h.length = INT32_MIN; });
  call.fault("margin", [&h] { h.margin = -1; });
  call.choice("algorithm", h.algorithm);
  call.choice("device", h.device);
  call.run = [&] { roll_amax_histories(h); };
  return call;
}
Call raise_call(Draws& draw) {
  Call call("raise_amaxes", draw);
  auto& found = call.object<std::vector<FoundAmax>>(
      std::vector<FoundAmax>(static_cast<std::size_t>(draw.below(4))));
  auto& device = call.object<Device>();
  for (FoundAmax& f : found) f.entry = call.memory<float>(1), f.amax = call.memory<float>(1);
  for (FoundAmax& f : found) {
    call.fault("entry null", [&f] { f.entry = nullptr; });
    call.fault("amax null", [&f] { f.amax = nullptr; });
  }
  call.choice("device", device);
  call.run = [&] { raise_amaxes(found, device); };
  return call;
}
Call advance_call(Draws& draw) {
  Call call("advance_random_state", draw);
  std::int64_t*& state = call.object<std::int64_t*>();
  std::int64_t*& copy = call.object<std::int64_t*>();
  auto& device = call.object<Device>();
  call.output("state", state, 2);
  call.output("copy", copy, 2);
  call.choice("device", device);
  call.run = [&] { advance_random_state(state, copy, device); };
  return call;
}

}  // namespace

const std::vector<MakeCall> kCodeCalls = {
    dequantize_call,      decode_call,      factor_call,
    product_factor_call,  as_fp8_call,      swizzle_call<false>,
    swizzle_call<true>,   nibbles_call,     sum_call,
    build_table_call,     check_table_call, clear_call,
    grouped_product_call, roll_call,        raise_call,
    advance_call};

}  // namespace minifloat::fuzz

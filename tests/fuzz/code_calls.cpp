// Calls that read codes, tables of groups, or what a model keeps from step to step.
#include <algorithm>

#include "fuzz/call.h"
#include "minifloat/amax_history.h"
#include "minifloat/group_checks.h"
#include "minifloat/messages.h"
#include "minifloat/random_state.h"
#include "minifloat/transform.h"

namespace minifloat::fuzz {
namespace {

// Draws an operand, perhaps in groups, with the memory that a cast would have written.
void add_quantized(Call& call, Quantized& q, bool (*fits)(const Spec&) = nullptr) {
  do q.spec = call.spec();
  while (fits && !fits(q.spec));
  const bool has_groups = !q.spec.has_blocks_2d() && call.one_in(3), along_cols = call.one_in(2);
  q.batch = has_groups ? 1 : call.below(3);
  q.rows = call.length(), q.cols = call.length();
  std::int64_t scales = q.batch * q.rows;
  if (has_groups) {
    const std::int64_t grouped = along_cols ? q.cols : q.rows;
    call.groups(q.groups, grouped);
    if (along_cols) {
      q.groups.unit = 128;
      q.cols = grouped_cols<std::int64_t>(grouped, 128, q.groups.count);
      scales = q.groups.count * q.rows;
      // Groups that are legal among rows, but not among these columns, and the other way round.
      call.drop("groups past the rows");
    }
    call.bad("a batch of groups", q.batch, {2});
  }
  if (q.spec.has_tensor_amax()) scales = q.parts();
  if (q.spec.has_blocks()) scales = q.batch * q.spec.scale_rows(q.rows) * q.spec.scale_cols(q.cols);
  const bool is_read = q.parts() * q.rows * q.cols > 0;
  const std::int64_t codes = q.batch * q.rows * q.spec.code_cols(q.cols),
                     scale_bytes = q.spec.scale_bytes();
  call.place("codes", q.codes, call.memory<std::uint8_t>(codes), is_read ? codes : 0, 1, false);
  call.place("scale", q.scale, call.memory<std::uint8_t>(scales * scale_bytes),
             is_read ? scales * scale_bytes : 0, scale_bytes, false);
  if (q.spec.has_outer_amax()) call.input("amax", q.amax, q.factors());
  call.wrong("device, batch, rows, cols", q.device, q.batch, q.rows, q.cols);
  call.spoil_spec(q.spec);
}
// Drops the faults of a part of an operand that a call does not read.
void drop_part(Call& call, const std::string& part) {
  call.drop(part.c_str());
  for (const char* where : {"out in the place of ", "out at the end of "})
    call.drop(where, part.c_str());
}

std::int64_t values_of(const Quantized& q) {
  return q.parts() * q.rows * q.cols == 0 ? 0 : q.batch * q.rows * q.spec.padded_cols(q.cols);
}

struct Dequantize : Named<"dequantize"> {
  Quantized q;
  DType dtype;
  void* out;
  void draw(Call& call) {
    dtype = call.dtype();
    add_quantized(call, q);
    call.output("out", out, values_of(q), size_of(dtype));
    if (values_of(q) == 0) call.drop("amax");
    call.wrong("dtype", dtype);
  }
  void run() const { dequantize(q, dtype, out); }
};
struct DecodeForProduct : Named<"decode_for_product"> {
  Quantized q;
  std::uint16_t* out;
  void draw(Call& call) {
    add_quantized(call, q, [](const Spec& spec) { return !spec.has_fp32_values(); });
    call.output("out", out, values_of(q));
    drop_part(call, "amax");
  }
  void run() const { decode_for_product(q, out); }
};
struct TensorFactor : Named<"tensor_factor"> {
  Quantized q;
  float* out;
  void draw(Call& call) {
    add_quantized(call, q);
    call.drop("scale null"), call.drop("scale at");
    if (q.spec.rule == ScaleRule::kTensor) call.input("scale of parts", q.scale, q.parts(), 4);
    call.output("out", out, q.factors());
    drop_part(call, "codes");
    std::erase_if(call.faults, [](const Fault& f) { return f.name.ends_with(" scale"); });
  }
  void run() const { tensor_factor(q, out); }
};
struct ProductFactor : Named<"product_factor"> {
  Quantized a, b;
  float* out;
  void draw(Call& call) {
    a.spec = Spec::parse("nvfp4"), b.spec = Spec::parse("e4m3/tensor");
    call.input("amax of a", a.amax, 1);
    call.input("scale of b", b.scale, 1, 4);
    call.output("out", out, 2);
    call.wrong("batch of a, batch of b, rows, cols, device of a, device of b", a.batch, b.batch,
               a.rows, b.cols, a.device, b.device);
    call.spoil_spec(a.spec), call.spoil_spec(b.spec);
  }
  void run() const { product_factor(a, b, out); }
};
struct Fp4AsFp8 : Named<"fp4_as_fp8"> {
  std::vector<Fp4AsFp8Cast> casts;
  void draw(Call& call) {
    casts.resize(static_cast<std::size_t>(1 + call.below(2)));
    for (Fp4AsFp8Cast& cast : casts) {
      Quantized& q = cast.operand;
      add_quantized(call, q, [](const Spec& spec) { return spec.is_fp4_by_powers_of_two(); });
      const std::int64_t rows = (q.groups.unit > 0 ? q.groups.count : q.batch) * q.rows;
      call.output("codes out", cast.codes, q.batch * q.rows * q.spec.padded_cols(q.cols));
      call.output("row_scale", cast.row_scale, rows);
      call.bad("spec of FP8", q.spec, {Spec::parse("mxfp8")});
    }
  }
  void run() const { fp4_as_fp8(casts); }
};

// ---- Layouts ------------------------------------------------------------------------------------
void add_scales(Call& call, ScaleMatrix& shape) {
  shape.rows = call.length(), shape.cols = call.length(), shape.batch = call.below(3);
  shape.kind = call.one_of({ScaleGroups::kNone, ScaleGroups::kAlongM, ScaleGroups::kAlongK});
  if (shape.kind != ScaleGroups::kNone) shape.batch = 1, shape.groups = call.below(4);
  call.wrong("kind, rows, cols", shape.kind, shape.rows, shape.cols);
  if (shape.kind != ScaleGroups::kNone) call.wrong("groups", shape.groups);
}

template <bool kBack, Text kName>
struct Swizzle : Named<kName> {
  ScaleMatrix shape;
  const std::uint8_t* in;
  std::uint8_t* out;
  void draw(Call& call) {
    add_scales(call, shape);
    if (shape.kind != ScaleGroups::kNone) {
      const std::int64_t length = shape.kind == ScaleGroups::kAlongM ? shape.rows : shape.cols;
      call.input("offsets", shape.offsets, shape.groups);
      call.fill_index("offsets with", shape.offsets, shape.groups, 0, length + 1, shape.groups);
      auto* const ends = const_cast<std::int32_t*>(shape.offsets);
      std::sort(ends, ends + shape.groups);
      call.bad("a batch of groups", shape.batch, {2});
    }
    const std::int64_t plain = shape.batch * shape.rows * shape.cols,
                       swizzled = shape.batch * shape.swizzled_bytes();
    const bool is_read = (kBack ? plain : swizzled) > 0;
    call.input("scales in", in, is_read ? (kBack ? swizzled : plain) : 0);
    call.output("scales out", out, is_read ? (kBack ? plain : swizzled) : 0);
    call.wrong("device, batch", shape.device, shape.batch);
  }
  void run() const { kBack ? unswizzle_scales(shape, in, out) : swizzle_scales(shape, in, out); }
};
struct SwizzledBytes : Named<"swizzled_bytes"> {
  ScaleMatrix shape;
  void draw(Call& call) { add_scales(call, shape); }
  void run() const { static_cast<void>(shape.swizzled_bytes()); }
};
struct TransposeNibbles : Named<"transpose_nibbles"> {
  CodeMatrix m;
  std::uint8_t* out;
  void draw(Call& call) {
    m.batch = call.below(3), m.rows = call.length(), m.cols = call.length();
    const bool any = m.batch * m.rows * m.cols > 0;
    call.input("codes", m.codes, any ? m.batch * m.rows * ((m.cols + 1) / 2) : 0);
    call.output("out", out, any ? m.batch * m.cols * ((m.rows + 1) / 2) : 0);
    call.wrong("device, batch, rows, cols", m.device, m.batch, m.rows, m.cols);
  }
  void run() const { transpose_nibbles(m, out); }
};
struct SumMessages : Named<"sum_messages"> {
  Messages m;
  DType dtype;
  void* out;
  void draw(Call& call) {
    m.spec = call.spec_of({"bf16", "mxfp8", "e4m3/1x128", "mxfp4"}), dtype = call.dtype();
    m.ranks = 1 + call.below(3), m.cols = call.length();
    call.input("messages", m.data, m.ranks * message_layout(m.spec, m.cols).bytes);
    call.output("out", out, m.cols, size_of(dtype));
    call.wrong("dtype, device, ranks, cols", dtype, m.device, m.ranks, m.cols);
    call.spoil_spec(m.spec);
  }
  void run() const { sum_messages(m, dtype, out); }
};

// ---- Groups -------------------------------------------------------------------------------------
struct BuildGroupTable : Named<"build_group_table"> {
  std::int64_t groups, rows;
  Device device = Device::kCpu;
  const std::int32_t* offs;
  std::int32_t* table;
  void draw(Call& call) {
    groups = call.below(5), rows = call.length();
    call.input("offs", offs, groups);  // any ends are legal
    call.output("table", table, kGroupTableRows * (groups + 1));
    call.wrong("groups, rows, device", groups, rows, device);
  }
  void run() const { build_group_table(offs, groups, rows, table, device, {}); }
};
struct CheckGroupTable : Named<"check_group_table"> {
  GroupTable groups;
  int unit = 0;
  std::int64_t rows;
  void draw(Call& call) {
    rows = call.length();
    call.groups(groups, rows);
    call.bad("read unit", unit, {-16, 24, 256});
  }
  void run() const { check_group_table("check", groups, Device::kCpu, unit, rows); }
};
struct ClearPastGroups : Named<"clear_past_groups"> {
  GroupTable groups;
  std::int64_t count, bytes;
  Device device = Device::kCpu;
  void* rows;
  void draw(Call& call) {
    count = call.length(), bytes = call.length();
    call.groups(groups, count);
    call.output("rows", rows, count * bytes, 1);
    call.wrong("count, row_bytes, device", count, bytes, device);
  }
  void run() const { clear_past_groups(groups, rows, bytes, count, device, {}); }
};

// ---- State --------------------------------------------------------------------------------------
struct RollHistories : Named<"roll_amax_histories"> {
  AmaxHistories h;
  void draw(Call& call) {
    h.count = call.below(4), h.length = static_cast<int>(1 + call.below(5));
    h.algorithm = call.one_of({DelayedAmax::kMax, DelayedAmax::kMostRecent});
    call.output("rows", h.rows, h.count * (1 + h.length));
    call.wrong("count", h.count);
    call.bad("length", h.length, {0, INT32_MIN});
    call.bad("margin", h.margin, {-1});
    call.wrong("algorithm, device", h.algorithm, h.device);
  }
  void run() const { roll_amax_histories(h); }
};
struct RaiseAmaxes : Named<"raise_amaxes"> {
  std::vector<FoundAmax> found;
  Device device = Device::kCpu;
  void draw(Call& call) {
    found.resize(static_cast<std::size_t>(call.below(4)));
    for (FoundAmax& f : found) {
      call.forget_places();  // they are raised one after the other
      call.input("amax", f.amax, 1);
      call.output("entry", f.entry, 1);
      call.drop("entry in the place of");
    }
    call.wrong("device", device);
  }
  void run() const { raise_amaxes(found, device); }
};
struct AdvanceRandomState : Named<"advance_random_state"> {
  std::int64_t *state, *copy;
  Device device = Device::kCpu;
  void draw(Call& call) {
    call.output("state", state, 2);
    call.output("copy", copy, 2);
    call.wrong("device", device);
  }
  void run() const { advance_random_state(state, copy, device); }
};

}  // namespace

const std::vector<Function> kCodes =
    functions<Dequantize, DecodeForProduct, TensorFactor, ProductFactor, Fp4AsFp8,
              Swizzle<false, "swizzle_scales">, Swizzle<true, "unswizzle_scales">, SwizzledBytes,
              TransposeNibbles, SumMessages, BuildGroupTable, CheckGroupTable, ClearPastGroups,
              RollHistories, RaiseAmaxes, AdvanceRandomState>();

}  // namespace minifloat::fuzz

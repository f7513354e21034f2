// Calls of partial casts, transposes and copies, and of the geometries that have no memory.
#include "fuzz/call.h"
#include "minifloat/experts.h"
#include "minifloat/messages.h"
#include "minifloat/partial_cast.h"

namespace minifloat::fuzz {
namespace {

Spec draw_nearest(Draws& draw) {
  Spec spec = draw_spec(draw);
  while (spec.stochastic || spec.transform > 0) spec = draw_spec(draw);
  return spec;
}

// Draws a cast of a shard.   reads_values: of a spec that chooses scales
void add_cast(Call& call, PartialCast& cast, bool reads_values, bool is_whole) {
  Draws& draw = call.draw;
  cast.spec = reads_values ? Spec::parse(draw.one_of<const char*>({"nvfp4/16x16+4over6"}))
                           : draw_nearest(draw);
  cast.columnwise = draw.one_in(2);
  cast.rows = draw.size(), cast.cols = draw.size();
  cast.compute = draw.one_of({DType::kFloat32, DType::kBFloat16});
  cast.dtype = draw.one_of({DType::kFloat32, DType::kBFloat16});
  const std::int64_t elements = cast.rows * cast.cols;
  if (is_whole || cast.spec.reads_values()) {
    cast.shard = {0, elements};
  } else {
    cast.shard.begin = draw.below(elements + 1);
    cast.shard.end = cast.shard.begin + draw.below(elements - cast.shard.begin + 1);
  }
  call.input("master", cast.master, cast.shard.size(), size_of(cast.dtype));
  const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
  const std::int64_t count = elements > 0 ? grid.count() : 0;
  call.output("amaxes", cast.amaxes, count);
  std::fill_n(cast.amaxes, count, 0x3F80'0000u);
  call.choice("dtype", cast.dtype);
  call.choice("compute", cast.compute);
  call.size("rows", cast.rows);
  call.size("cols", cast.cols);
  if (cast.shard.size() > 0) {
    call.fault("a shard before the weight", [&cast] { cast.shard.begin = -1; });
    call.fault("a shard past the weight", [&cast, elements] { cast.shard.end = elements + 1; });
    call.fault("a shard far past the weight", [&cast] { cast.shard.end = INT64_MAX; });
  }
  spoil_spec(call, cast.spec);
  for (const char* other : {"mxfp8/e5m2+sr", "nvfp4+eden", "bf16"})
    call.fault("spec " + std::string(other), [&cast, other] { cast.spec = Spec::parse(other); });
}
void add_outputs(Call& call, PartialCast& cast) {
  const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
  const Span bytes = FlatShard{cast.cols, cast.shard}.code_bytes(cast.spec.code_bits());
  const bool is_fragment = call.draw.one_in(2);
  cast.first_byte = is_fragment ? bytes.begin : 0;
  cast.keeps_other_nibbles = !is_fragment;
  call.output("codes", cast.codes, bytes.size() == 0 ? 0 : bytes.end - cast.first_byte);
  call.output("scale", cast.scale, grid.cells(), cast.spec.scale_bytes());
  const std::int64_t amaxes = grid.cells() == 0             ? 0
                              : cast.spec.has_row_amax()    ? grid.cells()
                              : cast.spec.has_tensor_amax() ? 1
                                                            : 0;
  if (amaxes > 0 || cast.spec.delayed) call.output("amax", cast.amax, amaxes, !cast.spec.delayed);
  if (bytes.size() > 0) {
    call.fault("codes from a later byte", [&cast] { cast.first_byte = INT64_MAX; });
    call.fault("codes from before the first", [&cast] { cast.first_byte = -1; });
  }
}

template <class F>
Call partial_call(Draws& draw, const char* name, bool reads_values, bool has_outputs, F function) {
  Call call(name, draw);
  auto& casts = call.object<std::vector<PartialCast>>(
      std::vector<PartialCast>(static_cast<std::size_t>(draw.below(3))));
  auto& device = call.object<Device>();
  for (PartialCast& cast : casts) {
    call.forget_places();  // each cast is looked at by itself
    add_cast(call, cast, reads_values, false);
    if (has_outputs) add_outputs(call, cast);
    if (reads_values && cast.shard.size() > 1) {
      // A shard that ends inside of a block, and the values to the end of the block's rows.
      call.fault("a cut without the values that follow", [&cast] {
        cast.following = nullptr;
        cast.shard.end -= 1;
      });
      if (cast.rows % 16 == 1 && cast.cols % 16 == 1) call.faults.pop_back();  // a block's end
    }
  }
  call.choice("device", device);
  call.run = [&, function] { function(casts, device); };
  return call;
}
Call partial_amax_call(Draws& draw) {
  return partial_call(draw, "partial_amax", false, false,
                      [](const auto& casts, Device device) { partial_amax(casts, device); });
}
Call choose_scales_call(Draws& draw) {
  return partial_call(draw, "choose_scales", true, false,
                      [](const auto& casts, Device device) { choose_scales(casts, device); });
}
Call partial_cast_call(Draws& draw) {
  return partial_call(draw, "partial_cast", false, true,
                      [](const auto& casts, Device device) { partial_cast(casts, device); });
}

Call transpose_call(Draws& draw) {
  Call call("transpose_many", draw);
  auto& list = call.object<std::vector<Transpose>>(
      std::vector<Transpose>(static_cast<std::size_t>(1 + draw.below(2))));
  auto& device = call.object<Device>();
  for (Transpose& m : list) {
    call.forget_places();  // each matrix is looked at by itself
    m.rows = draw.size(), m.cols = draw.size(), m.bits = draw.one_of({4, 8, 32});
    const std::int64_t size = m.bits == 32 ? 4 : 1;
    const auto count = [&](std::int64_t rows, std::int64_t cols) {
      return rows * (m.bits == 4 ? (cols + 1) / 2 : cols);
    };
    call.input("from", m.from, m.rows * m.cols == 0 ? 0 : count(m.rows, m.cols), size);
    call.output("to", m.to, m.rows * m.cols == 0 ? 0 : count(m.cols, m.rows), size);
    call.size("rows", m.rows);
    call.size("cols", m.cols);
    for (const int bad : {0, -8, 16}) call.fault("bits", [&m, bad] { m.bits = bad; });
  }
  call.choice("device", device);
  call.run = [&] { transpose_many(list, device); };
  return call;
}
Call copy_call(Draws& draw) {
  Call call("copy_many", draw);
  auto& list = call.object<std::vector<Copy>>(
      std::vector<Copy>(static_cast<std::size_t>(1 + draw.below(3))));
  auto& device = call.object<Device>();
  for (Copy& c : list) {
    call.forget_places();  // each copy is looked at by itself
    c.bytes = draw.size(), c.is_or = draw.one_in(2);
    call.input("from", c.from, c.bytes);
    call.output("to", c.to, c.bytes);
    call.size("bytes", c.bytes);
  }
  call.choice("device", device);
  call.run = [&] { copy_many(list, device); };
  return call;
}

// ---- Geometry -----------------------------------------------------------------------------------
Call grid_call(Draws& draw) {
  Call call("amax_grid", draw);
  auto& spec = call.object<Spec>(draw_spec(draw));
  auto& rows = call.object<std::int64_t>(draw.size());
  auto& cols = call.object<std::int64_t>(draw.size());
  spoil_spec(call, spec);
  call.size("rows", rows);
  call.size("cols", cols);
  call.run = [&] { static_cast<void>(amax_grid(spec, true, rows, cols)); };
  return call;
}
Call layout_call(Draws& draw) {
  Call call("message_layout and RowLayout", draw);
  auto& spec = call.object<Spec>(Spec::parse("mxfp4"));
  auto& cols = call.object<std::int64_t>(draw.size());
  spoil_spec(call, spec);
  call.size("cols", cols);
  call.run = [&] {
    static_cast<void>(message_layout(spec, cols));
    static_cast<void>(RowLayout({4, cols}));
  };
  return call;
}

}  // namespace

const std::vector<MakeCall> kShardCalls = {partial_amax_call, choose_scales_call, partial_cast_call,
                                           partial_cast_call, transpose_call,     copy_call,
                                           grid_call,         layout_call};

}  // namespace minifloat::fuzz

// Calls of partial casts, transposes and copies, and of the geometries that have no memory.
#include <algorithm>

#include "fuzz/call.h"
#include "minifloat/experts.h"
#include "minifloat/messages.h"
#include "minifloat/partial_cast.h"

namespace minifloat::fuzz {
namespace {

// Draws a cast of a shard.   reads_values: of a spec that chooses scales
void add_cast(Call& call, PartialCast& cast, bool reads_values) {
  do cast.spec = call.spec();
  while (cast.spec.stochastic || cast.spec.transform > 0 ||
         (reads_values && !cast.spec.reads_values()));
  cast.columnwise = call.one_in(2);
  cast.rows = call.length(), cast.cols = call.length();
  cast.compute = call.dtype(), cast.dtype = call.dtype();
  const std::int64_t elements = cast.rows * cast.cols;
  cast.shard = {0, elements};
  if (!cast.spec.reads_values()) {
    cast.shard.begin = call.below(elements + 1);
    cast.shard.end = cast.shard.begin + call.below(elements - cast.shard.begin + 1);
  }
  call.input("master", cast.master, cast.shard.size(), size_of(cast.dtype));
  const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
  const std::int64_t count = elements > 0 ? grid.count() : 0;
  call.output("amaxes", cast.amaxes, count);
  std::fill_n(cast.amaxes, count, 0x3F80'0000u);
  call.wrong("dtype, compute, rows, cols", cast.dtype, cast.compute, cast.rows, cast.cols);
  if (cast.shard.size() > 0) {
    call.bad("a shard before the weight", cast.shard.begin, {-1, INT64_MIN});
    call.bad("a shard past the weight", cast.shard.end, {elements + 1, INT64_MAX});
  }
  call.spoil_spec(cast.spec);
  for (const char* other : {"mxfp8/e5m2+sr", "nvfp4+eden", "bf16"})
    call.bad("another spec", cast.spec, {Spec::parse(other)});
}
void add_outputs(Call& call, PartialCast& cast) {
  const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
  const Span bytes = FlatShard{cast.cols, cast.shard}.code_bytes(cast.spec.code_bits());
  const bool is_fragment = call.one_in(2);
  cast.first_byte = is_fragment ? bytes.begin : 0;
  cast.keeps_other_nibbles = !is_fragment;
  call.output("codes", cast.codes, bytes.size() == 0 ? 0 : bytes.end - cast.first_byte);
  call.output("scale", cast.scale, grid.cells(), cast.spec.scale_bytes());
  const std::int64_t amaxes = grid.cells() == 0             ? 0
                              : cast.spec.has_row_amax()    ? grid.cells()
                              : cast.spec.has_tensor_amax() ? 1
                                                            : 0;
  if (cast.spec.delayed)
    call.output("amax", cast.amax, amaxes);
  else if (amaxes > 0)
    call.optional("amax", cast.amax, amaxes);
  if (bytes.size() > 0) call.bad("codes from another byte", cast.first_byte, {-1, INT64_MAX});
}

enum class Part { kAmax, kChoose, kCast };
template <Part kPart, Text kName>
struct Partial : Named<kName> {
  std::vector<PartialCast> casts;
  Device device = Device::kCpu;
  void draw(Call& call) {
    casts.resize(static_cast<std::size_t>(call.below(3)));
    for (PartialCast& cast : casts) {
      add_cast(call, cast, kPart == Part::kChoose);
      if (kPart == Part::kCast) add_outputs(call, cast);
      // A shard that ends inside of a block, and the values to the end of the block's rows.
      if (kPart != Part::kChoose || cast.shard.size() <= 1) continue;
      if (cast.rows % 16 != 1 || cast.cols % 16 != 1)
        call.bad("a cut without the values that follow", cast.shard.end, {cast.shard.end - 1});
    }
    call.wrong("device", device);
  }
  void run() const {
    if (kPart == Part::kAmax) partial_amax(casts, device);
    if (kPart == Part::kChoose) choose_scales(casts, device);
    if (kPart == Part::kCast) check_partial_casts(casts), partial_cast(casts, device);
  }
};
struct TransposeMany : Named<"transpose_many"> {
  std::vector<Transpose> list;
  Device device = Device::kCpu;
  void draw(Call& call) {
    list.resize(static_cast<std::size_t>(1 + call.below(2)));
    for (Transpose& m : list) {
      m.rows = call.length(), m.cols = call.length(), m.bits = call.one_of({4, 8, 32});
      const std::int64_t size = m.bits == 32 ? 4 : 1;
      const auto count = [&](std::int64_t rows, std::int64_t cols) {
        return rows * cols == 0 ? 0 : rows * (m.bits == 4 ? (cols + 1) / 2 : cols);
      };
      call.input("from", m.from, count(m.rows, m.cols), size);
      call.output("to", m.to, count(m.cols, m.rows), size);
      call.wrong("rows, cols", m.rows, m.cols);
      call.bad("bits", m.bits, {0, -8, 16});
    }
    call.wrong("device", device);
  }
  void run() const { transpose_many(list, device); }
};
struct CopyMany : Named<"copy_many"> {
  std::vector<Copy> list;
  Device device = Device::kCpu;
  void draw(Call& call) {
    list.resize(static_cast<std::size_t>(1 + call.below(3)));
    for (Copy& c : list) {
      call.forget_places();  // each copy is looked at by itself
      c.bytes = call.length(), c.is_or = call.one_in(2);
      call.input("from", c.from, c.bytes);
      call.output("to", c.to, c.bytes);
      call.wrong("bytes", c.bytes);
    }
    call.wrong("device", device);
  }
  void run() const { copy_many(list, device); }
};

// ---- Geometry -----------------------------------------------------------------------------------
struct Grid : Named<"amax_grid"> {
  Spec spec;
  std::int64_t rows, cols;
  void draw(Call& call) {
    do spec = call.spec();
    while (spec.rule == ScaleRule::kNvfp4Row);
    rows = call.length(), cols = call.length();
    call.spoil_spec(spec);
    call.wrong("rows, cols", rows, cols);
  }
  void run() const { static_cast<void>(amax_grid(spec, true, rows, cols)); }
};
struct OfMessages : Named<"message_layout"> {
  Spec spec = Spec::parse("mxfp4");
  std::int64_t cols;
  void draw(Call& call) {
    cols = call.length();
    call.spoil_spec(spec);
    call.wrong("cols", cols);
  }
  void run() const { static_cast<void>(message_layout(spec, cols)); }
};
struct OfRows : Named<"RowLayout"> {
  std::vector<std::int64_t> fields;
  void draw(Call& call) {
    fields = {call.length(), call.length()};
    call.wrong("a field, another", fields[0], fields[1]);
  }
  void run() const { static_cast<void>(RowLayout(fields)); }
};

}  // namespace

const std::vector<Function> kShards =
    functions<Partial<Part::kAmax, "partial_amax">, Partial<Part::kChoose, "choose_scales">,
              Partial<Part::kCast, "partial_cast">, Partial<Part::kCast, "partial_cast">,
              TransposeMany, CopyMany, Grid, OfMessages, OfRows>();

}  // namespace minifloat::fuzz

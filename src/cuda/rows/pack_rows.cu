// Rows of bytes for a message. A warp copies a row, field by field: 4 chunks a lane are loaded
// before the first is stored. Fields are copied in chunks of 16 bytes where all their rows allow
// it, else of 4, or byte by byte.
#include "backends.h"
#include "cuda/common/launch.h"
#include "cuda/common/vec8.cuh"

namespace minifloat::cuda {
namespace {

inline constexpr std::uint32_t kTogether = 4;

struct PackedField {
  const char* from;
  std::int64_t stride;
  std::uint32_t rows, begin, bytes;
  bool is_indexed;
  Divisor slots;
  int chunk;  // bytes
};

struct PackArgs {
  PackedField fields[kMaxRowFields];
  int count;
  const std::int32_t *index, *rows_from;
  std::uint32_t from_rows, rows, row_bytes;
  char* to;
};

// Copies a field of one row; from: null: zeros.
template <class Chunk>
__device__ __forceinline__ void copy_field(const char* from, char* to, std::uint32_t bytes) {
  const auto* const source = reinterpret_cast<const Chunk*>(from);
  auto* const target = reinterpret_cast<Chunk*>(to);
  const std::uint32_t count = bytes / sizeof(Chunk);
  for (std::uint32_t first = threadIdx.x % 32; first < count; first += 32 * kTogether) {
    Chunk chunk[kTogether] = {};
#pragma unroll
    for (std::uint32_t i = 0; i < kTogether; ++i)
      if (source && first + 32 * i < count) chunk[i] = __ldg(source + first + 32 * i);
#pragma unroll
    for (std::uint32_t i = 0; i < kTogether; ++i)
      if (first + 32 * i < count) target[first + 32 * i] = chunk[i];
  }
}

__global__ void __launch_bounds__(kRowThreads) pack(const __grid_constant__ PackArgs args) {
  const std::uint32_t row = blockIdx.x * kRowWarps + threadIdx.x / 32;
  if (row >= args.rows) return;
  char* const to = args.to + static_cast<std::int64_t>(row) * args.row_bytes;
  constexpr std::uint32_t kNone = ~0u;
  std::uint32_t number = row;
  if (args.rows_from) number = static_cast<std::uint32_t>(__ldg(args.rows_from + row));
  if (number >= args.from_rows) number = kNone;
  const std::uint32_t indexed = args.index && number != kNone
                                    ? static_cast<std::uint32_t>(__ldg(args.index + number))
                                    : kNone;
  std::uint32_t end = 0;  // of what is written
  const auto clear_to = [&](std::uint32_t begin) {
    const std::uint32_t at = end + threadIdx.x % 32;  // less than 32 bytes lie between fields
    if (at < begin) to[at] = 0;
  };
  for (int f = 0; f < args.count; ++f) {
    const PackedField& field = args.fields[f];
    std::uint32_t from_row = number;
    if (field.is_indexed) from_row = indexed >> 31 ? kNone : field.slots.divide(indexed);
    const char* const from = from_row < field.rows ? field.from + from_row * field.stride : nullptr;
    clear_to(field.begin);
    if (field.chunk == 16)
      copy_field<uint4>(from, to + field.begin, field.bytes);
    else if (field.chunk == 4)
      copy_field<std::uint32_t>(from, to + field.begin, field.bytes);
    else
      copy_field<std::uint8_t>(from, to + field.begin, field.bytes);
    end = field.begin + field.bytes;
  }
  clear_to(args.row_bytes);
}

PackedField packed(const RowField& field, std::int64_t begin) {
  const auto bits = reinterpret_cast<std::uintptr_t>(field.from) |
                    static_cast<std::uintptr_t>(field.from_rows > 1 ? field.from_stride : 0) |
                    static_cast<std::uintptr_t>(field.bytes | begin);
  return {.from = static_cast<const char*>(field.from),
          .stride = field.from_stride,
          .rows = static_cast<std::uint32_t>(field.from_rows),
          .begin = static_cast<std::uint32_t>(begin),
          .bytes = static_cast<std::uint32_t>(field.bytes),
          .is_indexed = field.slots != 0,
          .slots = Divisor(field.slots == 0 ? 1 : field.slots),
          .chunk = bits % 16 == 0  ? 16
                   : bits % 4 == 0 ? 4
                                   : 1};
}

}  // namespace

void pack_rows(const PackRows& of, const Execution& execution) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  const RowLayout layout = of.layout();
  MINIFLOAT_CHECK(of.rows < kMost && of.from_rows < kMost && layout.row_bytes < kMost,
                  "pack_rows: expected less than 2^31 rows of less than 2^31 bytes, got ", of.rows,
                  " from ", of.from_rows, ", of ", layout.row_bytes);
  PackArgs args = {.fields = {},
                   .count = static_cast<int>(of.fields.size()),
                   .index = of.index,
                   .rows_from = of.rows_from,
                   .from_rows = static_cast<std::uint32_t>(of.from_rows),
                   .rows = static_cast<std::uint32_t>(of.rows),
                   .row_bytes = static_cast<std::uint32_t>(layout.row_bytes),
                   .to = static_cast<char*>(of.to)};
  for (std::size_t f = 0; f < of.fields.size(); ++f) {
    MINIFLOAT_CHECK(of.fields[f].from_rows < kMost, "pack_rows: expected less than 2^31 rows, got ",
                    of.fields[f].from_rows);
    args.fields[f] = packed(of.fields[f], layout.begins[f]);
  }
  const auto grid = ceil_div<std::uint32_t>(args.rows, kRowWarps);
  pack<<<grid, kRowThreads, 0, cuda_stream(execution)>>>(args);
  check_launch("pack_rows");
}

}  // namespace minifloat::cuda

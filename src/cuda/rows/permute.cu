// The copies between tokens and rows. A warp takes a part of a row:
//
//     take_rows    2 KiB: 4 chunks of 16 bytes a lane, all loaded before the first is stored; of
//                  the result, or of x where the places of its rows are known
//     add_slots    512 columns: 2 x 8 a lane, 4 rows at a time, added in the order of the slots
//
//     bytes an element of a row in bf16: 2, and 2 / slots of x, or of the sum
#include "backends.h"
#include "cuda/common/launch.h"
#include "cuda/common/vec8.cuh"

namespace minifloat::cuda {
namespace {

// The parts of all rows, one a warp.
struct Parts {
  Divisor of_row;
  std::uint32_t count;
};
Parts parts_of(std::int64_t rows, std::int64_t of_row, const char* kernel) {
  MINIFLOAT_CHECK(rows * of_row < (std::int64_t{1} << 31), kernel,
                  ": expected less than 2^31 parts of rows, got ", rows, " rows of ", of_row);
  return {Divisor(of_row), static_cast<std::uint32_t>(rows * of_row)};
}
unsigned grid_of_parts(const Parts& parts) {
  return ceil_div<std::uint32_t>(parts.count, kRowWarps);
}
__device__ __forceinline__ std::uint32_t part_of_warp() {
  return blockIdx.x * kRowWarps + threadIdx.x / 32;
}

// ---- Copies -------------------------------------------------------------------------------------
inline constexpr int kTogether = 4;

struct TakeArgs {
  const char* from;
  std::int64_t from_stride, row_bytes;
  std::uint32_t from_rows;
  const std::int32_t* index;
  Divisor slots;
  const std::int32_t* places;  // of from's rows
  std::uint32_t rows;
  char* to;
  Parts parts;
};

// The chunks that a lane takes of a part of a row.
struct LaneChunks {
  std::uint32_t row, first, count;  // count: of the row

  template <class Chunk>
  __device__ __forceinline__ static LaneChunks of(const TakeArgs& args, std::uint32_t part) {
    const std::uint32_t row = args.parts.of_row.divide(part);
    return {row, (part - row * args.parts.of_row.d) * (32 * kTogether) + threadIdx.x % 32,
            static_cast<std::uint32_t>(args.row_bytes / sizeof(Chunk))};
  }
  // Calls body(i, chunk of the row) for each.
  template <class Body>
  __device__ __forceinline__ void each(Body body) const {
#pragma unroll
    for (std::uint32_t i = 0; i < kTogether; ++i)
      if (first + i * 32 < count) body(i, first + i * 32);
  }
};

// Returns the entry of a table of `rows`, or a number that no row has.
__device__ __forceinline__ std::uint32_t entry_of(const std::int32_t* table, std::uint32_t at,
                                                  std::uint32_t rows) {
  return at < rows ? static_cast<std::uint32_t>(__ldg(table + at)) : ~0u;
}

// Copies a part of the row of `pair` to one row of the result, or writes zeros where there is none.
// Chunk: the bytes that a lane copies at once.
template <class Chunk>
__device__ __forceinline__ void gather_part(const TakeArgs& args, const LaneChunks& of,
                                            std::uint32_t row, std::uint32_t pair) {
  const std::uint32_t from_row = pair >> 31 ? ~0u : args.slots.divide(pair);
  const auto* const from = reinterpret_cast<const Chunk*>(args.from + from_row * args.from_stride);
  auto* const to = reinterpret_cast<Chunk*>(args.to + row * args.row_bytes);
  Chunk chunk[kTogether] = {};
  if (from_row < args.from_rows)
    of.each([&](std::uint32_t i, std::uint32_t at) { chunk[i] = __ldg(from + at); });
  of.each([&](std::uint32_t i, std::uint32_t at) { to[at] = chunk[i]; });
}

template <class Chunk>
__global__ void __launch_bounds__(kRowThreads) gather_rows(const __grid_constant__ TakeArgs args) {
  const std::uint32_t part = part_of_warp();
  if (part >= args.parts.count) return;
  const LaneChunks of = LaneChunks::of<Chunk>(args, part);
  gather_part<Chunk>(args, of, of.row, static_cast<std::uint32_t>(__ldg(args.index + of.row)));
}

// Row t of `from` goes to the rows at its places. So that the result is gather_rows' for any
// `places`, a warp copies to a row only what `index` names there, and gathers those of the rows
// t * slots … that no place names.
template <class Chunk>
__global__ void __launch_bounds__(kRowThreads) scatter_rows(const __grid_constant__ TakeArgs args) {
  const std::uint32_t part = part_of_warp();
  if (part >= args.parts.count) return;
  const LaneChunks of = LaneChunks::of<Chunk>(args, part);
  const auto* const from = reinterpret_cast<const Chunk*>(args.from + of.row * args.from_stride);
  Chunk chunk[kTogether] = {};
  of.each([&](std::uint32_t i, std::uint32_t at) { chunk[i] = __ldg(from + at); });
  const std::uint32_t slots = args.slots.d;
  for (std::uint32_t first = 0; first < slots; first += kLanes) {
    // A lane takes the pair of a slot, and the row of the same number.
    const std::uint32_t slot = first + threadIdx.x % kLanes;
    const std::uint32_t number = slot < slots ? of.row * slots + slot : ~0u;
    const std::uint32_t place = entry_of(args.places, number, args.rows),
                        pair = entry_of(args.index, number, args.rows);
    const bool is_inverse = entry_of(args.index, place, args.rows) == number,
               is_named = entry_of(args.places, pair, args.rows) == number;
    unsigned places = __ballot_sync(kAllLanes, slot < slots && is_inverse);
    unsigned unnamed = __ballot_sync(kAllLanes, slot < slots && !is_named);
    for (; places != 0; places &= places - 1) {
      const std::uint32_t row = __shfl_sync(kAllLanes, place, __ffs(places) - 1);
      auto* const to = reinterpret_cast<Chunk*>(args.to + row * args.row_bytes);
      of.each([&](std::uint32_t i, std::uint32_t at) { to[at] = chunk[i]; });
    }
    for (; unnamed != 0; unnamed &= unnamed - 1) {
      const int lane = __ffs(unnamed) - 1;
      gather_part<Chunk>(args, of, __shfl_sync(kAllLanes, number, lane),
                         __shfl_sync(kAllLanes, pair, lane));
    }
  }
}

template <class Chunk>
void launch_copy(TakeArgs args, const Execution& execution) {
  constexpr std::int64_t kPart = 32 * kTogether * sizeof(Chunk);
  args.parts = parts_of(args.places ? args.from_rows : args.rows, ceil_div(args.row_bytes, kPart),
                        "take_rows");
  const auto kernel = args.places ? scatter_rows<Chunk> : gather_rows<Chunk>;
  kernel<<<grid_of_parts(args.parts), kRowThreads, 0, cuda_stream(execution)>>>(args);
  check_launch("take_rows");
}

// ---- Sums ---------------------------------------------------------------------------------------
struct AddArgs {
  const void* rows;
  std::int64_t stride;
  std::uint32_t count;
  int cols;
  bool is_aligned;
  const std::int32_t* places;
  int slots;
  const float* base;
  void* to;
  Parts parts;
};

inline constexpr int kVecsTogether = 2;
inline constexpr int kColumnsOfPart = kVecsTogether * kSwiGluPartials;

template <class T>
__global__ void __launch_bounds__(kRowThreads) add_rows(const __grid_constant__ AddArgs args) {
  const std::uint32_t part = part_of_warp();
  if (part >= args.parts.count) return;
  const std::uint32_t token = args.parts.of_row.divide(part);
  const int col = static_cast<int>((part - token * args.parts.of_row.d) * kColumnsOfPart +
                                   threadIdx.x % 32 * kSwiGluVec);
  // Calls body(i, columns before vec8 i, its columns) for each vec8 of the lane.
  const auto each_vec = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kVecsTogether; ++i) {
      const int before = i * kSwiGluPartials, count = min(args.cols - col - before, kSwiGluVec);
      if (count > 0) body(i, before, count);
    }
  };
  const auto load = [&](auto& vec, const auto* from, int count) {
    if (args.is_aligned && count == kSwiGluVec)
      vec.load(from);
    else
      vec.load_some(from, count);
  };
  const std::int64_t at = static_cast<std::int64_t>(token) * args.cols + col;
  const std::int32_t* const places = args.places + static_cast<std::int64_t>(token) * args.slots;
  float sum[kVecsTogether][kSwiGluVec] = {};
  if (args.base)
    each_vec([&](int v, int before, int count) {
      Vec8<float> base;
      load(base, args.base + at + before, count);
#pragma unroll
      for (int j = 0; j < kSwiGluVec; ++j) sum[v][j] = base[j];
    });
  for (int first = 0; first < args.slots; first += kTogether) {
    Vec8<T> row[kTogether][kVecsTogether];
    bool is_row[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const std::uint32_t place =
          first + i < args.slots ? static_cast<std::uint32_t>(__ldg(places + first + i)) : ~0u;
      is_row[i] = place < args.count;
      const T* const from = static_cast<const T*>(args.rows) + place * args.stride + col;
      if (is_row[i])
        each_vec([&](int v, int before, int count) { load(row[i][v], from + before, count); });
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (is_row[i])
        each_vec([&](int v, int, int) {
#pragma unroll
          for (int j = 0; j < kSwiGluVec; ++j) sum[v][j] += row[i][v][j];
        });
  }
  each_vec([&](int v, int before, int count) {
    Vec8<T> out = {};
#pragma unroll
    for (int j = 0; j < kSwiGluVec; j += 2) out.set_pair(j, sum[v][j], sum[v][j + 1]);
    out.canonicalize_nans();
    T* const to = static_cast<T*>(args.to) + at + before;
    if (args.is_aligned && count == kSwiGluVec)
      out.store(to);
    else
      out.store_some(to, count);
  });
}

}  // namespace

void take_rows(const TakeRows& copy, const Execution& execution) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  MINIFLOAT_CHECK(copy.row_bytes < kMost && copy.from_rows < kMost && copy.rows < kMost,
                  "take_rows: expected less than 2^31 rows of less than 2^31 bytes, got ",
                  copy.from_rows, " of ", copy.row_bytes, " for ", copy.rows);
  const TakeArgs args = {static_cast<const char*>(copy.from),
                         copy.from_stride,
                         copy.row_bytes,
                         static_cast<std::uint32_t>(copy.from_rows),
                         copy.index,
                         Divisor(copy.slots),
                         copy.places,
                         static_cast<std::uint32_t>(copy.rows),
                         static_cast<char*>(copy.to),
                         {}};
  const auto bits = reinterpret_cast<std::uintptr_t>(copy.from) |
                    reinterpret_cast<std::uintptr_t>(copy.to) |
                    static_cast<std::uintptr_t>(copy.row_bytes) |
                    static_cast<std::uintptr_t>(copy.from_rows > 1 ? copy.from_stride : 0);
  if (bits % 16 == 0)
    launch_copy<uint4>(args, execution);
  else if (bits % 4 == 0)
    launch_copy<std::uint32_t>(args, execution);
  else
    launch_copy<std::uint8_t>(args, execution);
}

void add_slots(const AddSlots& sum, const Execution& execution) {
  MINIFLOAT_CHECK(
      sum.cols <= (1 << 30) && sum.count < (std::int64_t{1} << 31) && sum.slots < (1 << 30),
      "add_slots: expected less than 2^31 rows of at most 2^30 columns, got ", sum.count, " of ",
      sum.cols);
  const std::int64_t size = sum.dtype == DType::kFloat32 ? 4 : 2;
  const bool is_aligned = has_aligned_rows(sum.rows, sum.stride * size, sum.count) &&
                          has_aligned_rows(sum.to, sum.cols * size, sum.tokens) &&
                          has_aligned_rows(sum.base, sum.cols * 4, sum.tokens);
  const AddArgs args = {
      sum.rows,
      sum.stride,
      static_cast<std::uint32_t>(sum.count),
      static_cast<int>(sum.cols),
      is_aligned,
      sum.places,
      static_cast<int>(sum.slots),
      sum.base,
      sum.to,
      parts_of(sum.tokens, ceil_div<std::int64_t>(sum.cols, kColumnsOfPart), "add_slots")};
  const auto kernel = sum.dtype == DType::kFloat32 ? add_rows<float> : add_rows<Bf16>;
  kernel<<<grid_of_parts(args.parts), kRowThreads, 0, cuda_stream(execution)>>>(args);
  check_launch("add_slots");
}

}  // namespace minifloat::cuda

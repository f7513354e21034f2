// The gradients of gate and up of groups, with the amaxes that casts of them scale by: of each row,
// and of each group's columns. A block takes a tile's rows of one group, a warp a row at a time,
// and a lane the columns that it has in swiglu.cu.
//
//     bytes an element of h: 6 read, 4 written (bf16)
#include "cuda/activation/activation.h"
#include "cuda/activation/swiglu.cuh"
#include "cuda/backend.h"
#include "cuda/common/groups.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "cuda/quantize/column_amaxes.cuh"

namespace minifloat::cuda {
namespace {

constexpr const char* kName = "swiglu_backward";
constexpr int kPairs = kSwiGluVec / 2;
constexpr int kMostSteps = 4;  // of a row; each takes kSwiGluPartials columns

// The gradient of gate, or of up, and its amaxes.
struct Half {
  Bf16* to;                // rows `stride` elements apart
  std::uint32_t* rows;     // of one matrix, both halves have the same: amaxes of whole rows
  std::uint32_t* columns;  // groups `columns_stride` apart, zero before
};
struct GroupArgs {
  SwiGluArgs of;
  const Bf16* dh;
  std::int64_t dh_stride;
  Half gate, up;
  std::int64_t stride, columns_stride;
  float* weights;  // zero before; null: none
  DeviceGroups groups;
};

// Eight columns of dh, gate and up.
struct Inputs {
  Vec8<Bf16> dh, gate, up;
};

// Names a vector's NaNs, raises the amaxes of its row and of its columns, and stores it.
template <int kSteps>
__device__ __forceinline__ void take(Vec8<Bf16>& d, Bf16* to, int step, std::uint32_t& row,
                                     ColumnAmaxes<kSteps, kPairs>& columns) {
  d.canonicalize_nans();
  std::uint32_t magnitudes[kPairs];
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    magnitudes[k] = d.w[k] & 0x7FFF'7FFFu;
    row = __vmaxu2(row, magnitudes[k]);
  }
  columns.take(step, magnitudes);
  d.store(to);
}

// Writes a row's gradients and its amaxes, by a warp.
template <int kSteps>
__device__ __forceinline__ void write_row(const GroupArgs& args, std::uint32_t row,
                                          ColumnAmaxes<kSteps, kPairs>& of_gate,
                                          ColumnAmaxes<kSteps, kPairs>& of_up) {
  const SwiGluArgs& of = args.of;
  const int first = static_cast<int>(threadIdx.x % 32) * kSwiGluVec;
  const std::uint32_t place = of.place_of(row);
  const float weight = of.weight_at(place);
  Inputs in[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int col = first + i * kSwiGluPartials;
    if (col >= of.width) break;
    in[i].dh.load(args.dh + row * args.dh_stride + col);
    in[i].gate.load(static_cast<const Bf16*>(of.gate) + row * of.gate_stride + col);
    in[i].up.load(static_cast<const Bf16*>(of.up) + row * of.up_stride + col);
  }
  float partial[kSwiGluVec] = {};
  std::uint32_t largest_gate = 0, largest_up = 0;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int col = first + i * kSwiGluPartials;
    if (col >= of.width) break;
    Vec8<Bf16> gate, up;
#pragma unroll
    for (int j = 0; j < kSwiGluVec; j += 2) {
      SwiGluGradient d[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        d[k] = swiglu_gradient<false>(in[i].dh[j + k], in[i].gate[j + k], in[i].up[j + k], weight,
                                      of.form, FastReciprocal{});
        partial[j + k] += d[k].weight;
      }
      gate.set_pair(j, d[0].gate, d[1].gate);
      up.set_pair(j, d[0].up, d[1].up);
    }
    take(gate, args.gate.to + row * args.stride + col, i, largest_gate, of_gate);
    take(up, args.up.to + row * args.stride + col, i, largest_up, of_up);
  }
  const bool is_one = args.gate.rows == args.up.rows;
  if (is_one) largest_gate = __vmaxu2(largest_gate, largest_up);
  const std::uint32_t amax_of_gate = warp_max(larger_of_pair(largest_gate)),
                      amax_of_up = is_one ? amax_of_gate : warp_max(larger_of_pair(largest_up));
  const float sum = args.weights ? sum_of_partials(partial) : 0.0f;
  if (threadIdx.x % 32 != 0) return;
  args.gate.rows[row] = amax_of_gate;
  args.up.rows[row] = amax_of_up;
  if (args.weights && place < of.rows) args.weights[place] = canonicalize_nan(sum);
}

// Clears a tile's rows past the last group's end.   first: of the tile
__device__ __forceinline__ void clear_rows(const GroupArgs& args, std::uint32_t first) {
  const std::uint32_t end = min(first + kTile, static_cast<std::uint32_t>(args.of.rows));
  for (std::uint32_t row = first + threadIdx.x / 32; row < end; row += kRowWarps)
    for (int col = static_cast<int>(threadIdx.x % 32) * kSwiGluVec; col < args.of.width;
         col += kSwiGluPartials) {
      constexpr Vec8<Bf16> kZeros = {};
      kZeros.store(args.gate.to + row * args.stride + col);
      kZeros.store(args.up.to + row * args.stride + col);
    }
}

template <int kSteps>
__global__ void __launch_bounds__(kRowThreads, 2)
    swiglu_backward_of_group_rows(const __grid_constant__ GroupArgs args) {
  const DeviceGroups& groups = args.groups;
  const std::uint32_t tile = blockIdx.x * kTile, tiles = load_boundary(groups.tiles, groups.count);
  // The tiles that no group has suffice for the rows past the last one.
  if (tile >= tiles)
    return clear_rows(args, load_boundary(groups.rows, groups.count) + (tile - tiles));
  const GroupPlace group = find_group(groups, tile);
  const std::uint32_t first = tile - group.first_tile,
                      end = min(first + std::uint32_t{kTile}, group.rows);
  ColumnAmaxes<kSteps, kPairs> of_gate, of_up;
#pragma unroll 1
  for (std::uint32_t row = first + threadIdx.x / 32; row < end; row += kRowWarps)
    write_row<kSteps>(args, group.begin + row, of_gate, of_up);
  __shared__ SharedColumns<kWarp, kSteps, kPairs> shared;
  const auto width = static_cast<std::uint32_t>(args.of.width);
  const std::int64_t at = group.group * args.columns_stride;
  raise_columns(of_gate, shared, width, args.gate.columns + at);
  __syncthreads();
  raise_columns(of_up, shared, width, args.up.columns + at);
}

template <int kSteps>
bool launch(const GroupArgs& args, const Execution& execution) {
  if (args.of.width > kSteps * kSwiGluPartials) return false;
  const std::int64_t tiles = ceil_div<std::int64_t>(args.of.rows, kTile) + args.groups.count;
  swiglu_backward_of_group_rows<kSteps>
      <<<grid_of(tiles, kName), kRowThreads, 0, cuda_stream(execution)>>>(args);
  check_launch(kName);
  return true;
}

void clear(float* memory, std::int64_t count, const Execution& execution) {
  check(cudaMemsetAsync(memory, 0, static_cast<std::size_t>(count) * sizeof(float),
                        cuda_stream(execution)),
        kName);
}

}  // namespace

bool swiglu_backward_of_groups(const SwiGlu& of, const SwiGluGradients& d,
                               const Execution& execution) {
  const bool is_one = !d.of_up;  // matrix
  const auto bits = [](float* amaxes) { return reinterpret_cast<std::uint32_t*>(amaxes); };
  GroupArgs args = {};
  args.of = args_of(of);
  args.dh = static_cast<const Bf16*>(d.dh), args.dh_stride = d.dh_stride;
  args.gate = {static_cast<Bf16*>(d.gate), bits(d.of_gate.rows), bits(d.of_gate.columns)};
  args.up = {static_cast<Bf16*>(d.up), is_one ? args.gate.rows : bits(d.of_up.rows),
             is_one ? args.gate.columns + of.width : bits(d.of_up.columns)};
  args.stride = d.stride, args.columns_stride = is_one ? 2 * of.width : of.width;
  args.weights = d.weights;
  args.groups = device_groups(of.groups);
  const bool fits = of.dtype == DType::kBFloat16 && of.activation == Activation::kSilu && of.up &&
                    !of.has_limit && !of.is_interleaved && args.of.is_aligned && of.rows > 0 &&
                    of.width <= kMostSteps * kSwiGluPartials &&
                    has_aligned_rows(d.dh, d.dh_stride * 2, of.rows) &&
                    has_aligned_rows(d.gate, d.stride * 2, of.rows) &&
                    has_aligned_rows(d.up, d.stride * 2, of.rows);
  if (!fits) return false;
  const std::int64_t columns = of.groups.count * args.columns_stride;
  clear(d.of_gate.columns, columns, execution);
  if (!is_one) clear(d.of_up.columns, columns, execution);
  if (d.weights) clear(d.weights, of.rows, execution);
  return launch<1>(args, execution) || launch<2>(args, execution) || launch<3>(args, execution) ||
         launch<kMostSteps>(args, execution);
}

}  // namespace minifloat::cuda

// The amaxes that casts of h scale by, from a read of gate and up: of rows, columns and transformed
// columns of tiles; and of the whole matrix, and of its rows, with h itself, which the cast then
// reads.
//
//     bytes an element of h: 2 + 2 of gate and up; with h, 2
#include "cuda/activation/quantize_swiglu.h"
#include "cuda/activation/required_amaxes.h"
#include "cuda/activation/swiglu_tile.cuh"
#include "cuda/activation/tile_amaxes.cuh"
#include "cuda/common/layout.h"
#include "cuda/common/reduce.cuh"

namespace minifloat::cuda {
namespace {

constexpr const char* kName = "quantize_swiglu";
constexpr int kH = 1;  // its number among the matrices of SwiGluAmaxes

// ---- Of the whole matrix ------------------------------------------------------------------------
constexpr unsigned kVecsOfThread = 4;

struct WholeArgs {
  SwiGluArgs of;
  Bf16* h;  // contiguous
  Divisor across;
  std::uint32_t count;  // vec8s
  std::uint32_t* amax;  // zero before
  std::uint32_t* rows;  // of each row, zero before
};

// Raises the amax of vec8 u's row by its pair of largest magnitudes. Where rows have whole warps of
// vec8s, a warp raises it once.
__device__ __forceinline__ void raise_row(const WholeArgs& args, std::uint32_t u,
                                          std::uint32_t pair) {
  std::uint32_t m = larger_of_pair(pair);
  const bool is_of_warp = args.across.d % 32 == 0;
  if (is_of_warp) m = warp_max(m);
  if (!is_of_warp || threadIdx.x % 32 == 0)
    atomicMax(args.rows + args.across.divide(u), canonicalize_nan_magnitude(m));
}

// Writes h and its amax, and those of its rows where kHasRows. A block takes a run of vec8s, of
// rows one after the other, and a thread has the next one's loads in flight.
template <bool kHasLimit, Activation kActivation, bool kHasRows>
__global__ void __launch_bounds__(kThreads, 5)
    swiglu_with_amax(const __grid_constant__ WholeArgs args) {
  struct Inputs {
    GateAndUp8 both;
    float weight;
  };
  const auto load = [&](std::uint32_t u) {
    Inputs in = {};
    if (u >= args.count) return in;
    const std::uint32_t row = args.across.divide(u), col = (u - row * args.across.d) * kSwiGluVec;
    return Inputs{load_gate_and_up(args.of, row, col), args.of.weight_at(args.of.place_of(row))};
  };
  std::uint32_t largest = 0, u = blockIdx.x * (kThreads * kVecsOfThread) + threadIdx.x;
  Inputs next = load(u);
#pragma unroll 1
  for (unsigned i = 0; i < kVecsOfThread; ++i, u += kThreads) {
    const Inputs in = next;
    if (i + 1 < kVecsOfThread) next = load(u + kThreads);
    if (u >= args.count) break;
    const Vec8<Bf16> h = h_of<kHasLimit, kActivation>(args.of, in.both, in.weight);
    const std::uint32_t of_vec = largest_pair(h.w);
    largest = max_magnitude_bf16x2(largest, of_vec);
    if constexpr (kHasRows) raise_row(args, u, of_vec);
    h.store(args.h + std::uint64_t{u} * kSwiGluVec);
  }
  raise_by_block(args.amax, canonicalize_nan_magnitude(larger_of_pair(largest)));
}

template <bool kHasLimit, Activation kActivation>
void launch_with_amax(const WholeArgs& args, const Execution& execution) {
  constexpr std::int64_t kBlock = kThreads * kVecsOfThread;
  const auto kernel = args.rows ? swiglu_with_amax<kHasLimit, kActivation, true>
                                : swiglu_with_amax<kHasLimit, kActivation, false>;
  kernel<<<grid_of(ceil_div<std::int64_t>(args.count, kBlock), kName), kThreads, 0,
           cuda_stream(execution)>>>(args);
  check_launch(kName);
}

// ---- Of tiles -----------------------------------------------------------------------------------
__global__ void __launch_bounds__(kThreads, 4)
    amax_of_swiglu_tiles(const __grid_constant__ SwiGluArgs of,
                         const __grid_constant__ KernelInput h,
                         const __grid_constant__ Divisor across,
                         const __grid_constant__ SwiGluAmaxes amaxes) {
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ float weights[kTile];
  const SharedTile<Bf16> tile = {words};
  const std::uint32_t of_rows = across.divide(blockIdx.x),
                      col = (blockIdx.x - of_rows * across.d) * kTile;
  const TilePlace place = {0, of_rows * kTile, col};
  fill_with_h(of, {h, place, true, 0, 0, static_cast<std::uint32_t>(h.rows)}, tile, weights);
  __syncthreads();
  if (amaxes.rows[kH]) raise_lines<false>(tile, amaxes.rows[kH] + place.row);
  if (amaxes.cols[kH]) raise_lines<true>(tile, amaxes.cols[kH] + place.col);
  if (amaxes.whole[kH]) raise_by_block(amaxes.whole[kH], amax_of_tile<false>(tile));
  __syncthreads();
  if (amaxes.transformed[kH]) raise_by_block(amaxes.transformed[kH], amax_of_tile<true>(tile));
}

}  // namespace

void find_swiglu_amaxes(const SwiGluArgs& of, const TensorRef& h, const SwiGluAmaxes& amaxes,
                        const Execution& execution) {
  const Divisor across(h.cols / kTile);
  amax_of_swiglu_tiles<<<grid_of(h.rows / kTile * across.d, kName), kThreads,
                         SharedTile<Bf16>::kBytes, cuda_stream(execution)>>>(of, kernel_input(h),
                                                                             across, amaxes);
  check_launch(kName);
}

void write_swiglu_and_amax(const SwiGluArgs& of, Bf16* h, const SwiGluAmaxes& amaxes,
                           const Execution& execution) {
  const auto vecs_of_row = static_cast<std::uint32_t>(of.width / kSwiGluVec);
  const WholeArgs args = {of,
                          h,
                          Divisor(vecs_of_row),
                          static_cast<std::uint32_t>(of.rows * vecs_of_row),
                          amaxes.whole[kH],
                          amaxes.rows[kH]};
  if (of.has_limit) return launch_with_amax<true, Activation::kSilu>(args, execution);
  switch (of.activation) {
    case Activation::kSilu: return launch_with_amax<false, Activation::kSilu>(args, execution);
    case Activation::kGelu: return launch_with_amax<false, Activation::kGelu>(args, execution);
    case Activation::kGeluTanh:
      return launch_with_amax<false, Activation::kGeluTanh>(args, execution);
  }
}

}  // namespace minifloat::cuda

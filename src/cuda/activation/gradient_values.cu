// The gradients of gate and up as values, their amaxes, and the columnwise cast of h, from one read
// of dh, gate and up. A block computes a tile of 128 x 128, and keeps h's values in shared memory.
// A thread stores d_gate only where it has already read dh, so d_gate may have dh's memory.
//
//     bytes an element: 6 read, 4 written, and 1 of h's codes
#include <algorithm>
#include <type_traits>

#include "cuda/activation/activation.h"
#include "cuda/activation/gradient_tile.cuh"
#include "cuda/backend.h"
#include "cuda/quantize/planned_cast.cuh"
#include "cuda/quantize/preset_table.cuh"
#include "cuda/quantize/preset_tile.cuh"
#include "gradients_in_steps.h"

namespace minifloat::cuda {
namespace {

struct Backend {
  static constexpr auto quantize_swiglu = cuda::quantize_swiglu;
  static constexpr auto swiglu_backward = cuda::swiglu_backward;
  static constexpr auto amax = cuda::amax;
};

constexpr const char* kName = "swiglu_backward_with_amaxes";

// The inputs of the kernel, and the memory of its results.
struct ValuesArgs {
  GradientArgs in;
  Bf16 *d_gate, *d_up;  // rows `stride` elements apart
  std::int64_t stride;
  std::uint32_t* amaxes;  // of d_gate and d_up; zero at launch
  KernelOperand h;        // where h is cast
};

template <Activation kActivation, bool kHasUp, class H>
__global__ void __launch_bounds__(kThreads, 4)
    gradient_values(const __grid_constant__ ValuesArgs args) {
  constexpr bool kHasH = !std::is_same_v<H, Absent>;
  constexpr unsigned kChunks = kTile / kSwiGluVec, kStep = kThreads / kChunks;
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ Whole whole;
  __shared__ std::uint32_t largest[3];
  const SharedTile<Bf16> tile = {words};
  const TilePlace place = gradient_place(args.in);
  const unsigned chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const std::uint32_t col = place.col + chunk * kSwiGluVec;
  GradientChunk next = load_chunk(args.in, place.row + first, col);
  if (threadIdx.x < 3) largest[threadIdx.x] = 0;
  if constexpr (kHasH)
    if (threadIdx.x == 32) prepare<H>(args.h, whole, 0, place.row == 0 && place.col == 0);
  LargestPairs pairs;
#pragma unroll 1
  for (unsigned r = first; r < kTile; r += kStep) {
    const GradientChunk in = next;
    if (r + kStep < kTile) next = load_chunk(args.in, place.row + r + kStep, col);
    const GradientResults out = gradient_results<kActivation, kHasH, kHasUp>(in, pairs);
    const std::int64_t at = (place.row + r) * args.stride + col;
    out.d_gate.store(args.d_gate + at);
    if constexpr (kHasUp) out.d_up.store(args.d_up + at);
    if constexpr (kHasH) out.h.store(reinterpret_cast<Bf16*>(tile.chunk_at(r, chunk)));
  }
  __syncthreads();
  raise_in_block(pairs, largest);
  if constexpr (kHasH)
    cast_preset_tile<H, true, false, false>(args.h, whole, tile,
                                            tile_of_matrix<true>(args.h, place), nullptr);
  __syncthreads();
  if (threadIdx.x == 0) raise_bits(args.amaxes, largest[0]);
  if (kHasUp && threadIdx.x == 32) raise_bits(args.amaxes + 1, largest[2]);
}

template <Activation kActivation, bool kHasUp, class H>
void launch(const ValuesArgs& args, const Execution& execution) {
  constexpr std::size_t kBytes = std::is_same_v<H, Absent> ? 0 : SharedTile<Bf16>::kBytes;
  const std::int64_t tiles = args.in.of.rows / kTile * args.in.across.d;
  gradient_values<kActivation, kHasUp, H>
      <<<grid_of(tiles, kName), kThreads, kBytes, cuda_stream(execution)>>>(args);
  check_launch(kName);
}
template <Activation kActivation, class H>
void launch(const ValuesArgs& args, const Execution& execution) {
  args.in.of.up ? launch<kActivation, true, H>(args, execution)
                : launch<kActivation, false, H>(args, execution);
}
template <class H>
void launch(const ValuesArgs& args, const Execution& execution) {
  switch (args.in.of.activation) {
    case Activation::kSilu: return launch<Activation::kSilu, H>(args, execution);
    case Activation::kGelu: return launch<Activation::kGelu, H>(args, execution);
    case Activation::kGeluTanh: return launch<Activation::kGeluTanh, H>(args, execution);
  }
}

// Returns whether the kernel writes gradients of these sizes and alignments.
bool fits(const SwiGlu& of, const SwiGluGradients& to, const SwiGluArgs& args) {
  return of.dtype == DType::kBFloat16 && args.is_aligned && of.rows % kTile == 0 &&
         of.width % kTile == 0 && has_aligned_rows(to.dh, to.dh_stride * 2, of.rows) &&
         has_aligned_rows(to.gate, to.stride * 2, of.rows) &&
         (!of.up || has_aligned_rows(to.up, to.stride * 2, of.rows));
}

bool values_in_one(const SwiGlu& of, const SwiGluGradients& to, float* amaxes, int count,
                   const Operand* h_col, const Execution& execution) {
  ValuesArgs args = {};
  args.in = {args_of(of), static_cast<const Bf16*>(to.dh), to.dh_stride, h_col != nullptr,
             Divisor(std::max<std::int64_t>(of.width / kTile, 1))};
  if (!fits(of, to, args.in.of)) return false;
  args.d_gate = static_cast<Bf16*>(to.gate), args.d_up = static_cast<Bf16*>(to.up);
  args.stride = to.stride;
  args.amaxes = reinterpret_cast<std::uint32_t*>(amaxes);
  // The kernel casts h only by an amax that the caller passes; else a pass over h comes first.
  const bool has_scale = h_col && h_col->given_amax && is_of<preset::Tensor>(h_col->spec);
  PlannedCast h(of.h_at(of.gate), nullptr, has_scale ? h_col : nullptr);
  const bool casts_h = has_scale && h.leave_amaxes_to_cast();
  check(cudaMemsetAsync(amaxes, 0, static_cast<std::size_t>(count) * sizeof(float),
                        cuda_stream(execution)),
        kName);
  if (casts_h) {
    h.find_amaxes(nullptr, execution);
    args.h = h.args.col;
    launch<preset::Tensor>(args, execution);
    return true;
  }
  if (h_col) cuda::quantize_swiglu(of, nullptr, h_col, execution);
  launch<Absent>(args, execution);
  return true;
}

}  // namespace

void swiglu_backward_with_amaxes(const SwiGlu& of, const SwiGluGradients& gradients, float* amaxes,
                                 int count, const Operand* h_col, const Execution& execution) {
  if (values_in_one(of, gradients, amaxes, count, h_col, execution)) return;
  gradients_in_steps<Backend>(of, gradients, amaxes, count, h_col, execution);
}

}  // namespace minifloat::cuda

// Kernels for the scales and amaxes of whole matrices, groups and rows: one thread computes one.
#pragma once

#include "cuda/codec/scale.cuh"
#include "minifloat/core/amax_history.h"
#include "minifloat/quantize.h"

namespace minifloat::cuda {

// The outputs of matrices and rows without elements, which no other kernel writes, or of groups.
struct WholeArgs {
  std::int64_t count;
  const float* active_amax;  // null: zero
  const float* reported;     // the values for `amax`; null: zero
  float* amax;               // null: not written
  float* scale;              // null: the rule's scales are those of blocks
  Elements elements;
  ScaleRule rule;
  ScaleRounding rounding;
  const std::int32_t* last_end;  // of groups: rows from there on are not written; null: all are
};
__device__ __forceinline__ float scale_of_whole(const WholeArgs& args, std::uint32_t amax) {
  switch (args.elements) {
    case Elements::kE4m3: return fp32_factors<E4M3>(args.rule, args.rounding, amax).scale;
    case Elements::kE5m2: return fp32_factors<E5M2>(args.rule, args.rounding, amax).scale;
    case Elements::kE2m1:
    case Elements::kE1m2:
    case Elements::kBf16: break;  // no fp32 scale
  }
  return nan_value();
}
// Writes the scale and the amax of each.
static __global__ void write_whole(const __grid_constant__ WholeArgs args) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.count || (args.last_end && i >= *args.last_end)) return;
  const std::uint32_t bits = args.active_amax ? magnitude_bits(args.active_amax[i]) : 0;
  if (args.scale) args.scale[i] = scale_of_whole(args, bits);
  if (args.amax) args.amax[i] = args.reported ? args.reported[i] : 0.0f;
}

// Raises the entries of an amax history to amaxes that a pass before the cast found.
static __global__ void raise_entries(HistoryEntries history, const float* amax,
                                     std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float& entry = history.first[i * history.stride];
  entry = larger_amax(entry, amax[i]);
}

}  // namespace minifloat::cuda

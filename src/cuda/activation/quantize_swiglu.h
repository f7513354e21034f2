// The kernels that quantize_swiglu.cu chooses from: casts of h that compute it as they go. A `find`
// returns the launch of its kernel for the specs and sizes of a cast; null where none is compiled.
#pragma once

#include "minifloat/experts.h"

namespace minifloat::cuda {

struct GradientArgs;   // gradient_tile.cuh
struct GradientPlans;  // gradient_plans.cuh
struct QuantizeArgs;   // quantize/general.cuh
struct SwiGluAmaxes;   // required_amaxes.h
struct SwiGluArgs;     // swiglu.cuh

using LaunchSwiGluCast = void (*)(const SwiGluArgs& of, const QuantizeArgs& args,
                                  const Execution& execution);

// Rowwise: with a scale a row, which the caller has not passed, or with any other.
LaunchSwiGluCast find_swiglu_whole_rows(const QuantizeArgs& args);
LaunchSwiGluCast find_swiglu_rows(const QuantizeArgs& args);
// The former with the amaxes of the columns of groups.
LaunchSwiGluCast find_swiglu_rows_and_amaxes_of_columns(const QuantizeArgs& args);

// Columnwise, and rowwise as well where that is cast.
LaunchSwiGluCast find_swiglu_tiles(const QuantizeArgs& args);

// Both directions of the gradients of gate and up, and h columnwise where it is cast.
struct GradientSpecs {
  Spec row, col, h;
  bool has_h;
  bool as_fp8;  // whether all are FP4 that is written as FP8; else none is
};
using LaunchGradients = void (*)(const GradientArgs& args, const GradientPlans& plans,
                                 const Execution& execution);
LaunchGradients find_gradients_fp8(const GradientSpecs& specs);
LaunchGradients find_gradients_fp4(const GradientSpecs& specs);

// Writes h, contiguous, and raises its amax, and those of its rows where amaxes has them. of:
// without groups
void write_swiglu_and_amax(const SwiGluArgs& of, std::uint16_t* h, const SwiGluAmaxes& amaxes,
                           const Execution& execution);

// Raise the amaxes that the casts scale by: of d_gate, h and d_up, or of tiles of h alone.
void find_gradient_amaxes(const GradientArgs& args, const SwiGluAmaxes& amaxes,
                          const Execution& execution);
void find_swiglu_amaxes(const SwiGluArgs& of, const TensorRef& h, const SwiGluAmaxes& amaxes,
                        const Execution& execution);

}  // namespace minifloat::cuda

// The launches that quantize_swiglu.cu chooses from: casts of h that compute it as they go. Each
// returns false, and launches nothing, where no kernel is compiled for the specs and sizes.
#pragma once

#include "minifloat/experts.h"

namespace minifloat::cuda {

struct GradientArgs;   // gradient_tile.cuh
struct GradientPlans;  // gradient_plans.cuh
struct QuantizeArgs;   // quantize/general.cuh
struct SwiGluAmaxes;   // found_amaxes.h
struct SwiGluArgs;     // swiglu.cuh

// Cast rowwise: with a scale a row, or with any other.
bool launch_swiglu_whole_rows(const SwiGluArgs& of, const QuantizeArgs& args,
                              const Execution& execution);
// The same with a scale a row, and the amaxes of the columns of groups.
bool launch_swiglu_rows_and_amaxes_of_columns(const SwiGluArgs& of, const QuantizeArgs& args,
                                              const Execution& execution);
bool launch_swiglu_rows(const SwiGluArgs& of, const QuantizeArgs& args, const Execution& execution);

// Casts columnwise, and rowwise as well where that is set.   execution: null: only whether a kernel
// is compiled is returned
bool launch_swiglu_tiles(const SwiGluArgs& of, const QuantizeArgs& args, bool rowwise,
                         const Execution* execution);

// Cast both directions of the gradients of gate and up, and h columnwise. plans: null: only whether
// a kernel is compiled for the specs is returned.
struct GradientSpecs {
  Spec row, col, h;
  bool as_fp8;  // whether all are FP4 that is written as FP8; else none is
};
bool launch_gradients_fp8(const GradientSpecs& specs, const GradientArgs& args,
                          const GradientPlans* plans, const Execution& execution);
bool launch_gradients_fp4(const GradientSpecs& specs, const GradientArgs& args,
                          const GradientPlans* plans, const Execution& execution);

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

// The launches that quantize_swiglu.cu chooses from: casts of h that compute it as they go. Each
// returns false, and launches nothing, where no kernel is compiled for the specs and sizes.
#pragma once

#include "minifloat/experts.h"

namespace minifloat::cuda {

struct QuantizeArgs;  // quantize/general.cuh
struct SwiGluArgs;    // swiglu.cuh

// Cast rowwise: with a scale a row, or with any other.
bool launch_swiglu_whole_rows(const SwiGluArgs& of, const QuantizeArgs& args,
                              const Execution& execution);
bool launch_swiglu_rows(const SwiGluArgs& of, const QuantizeArgs& args, const Execution& execution);

// Casts columnwise, and rowwise as well where that is set.
bool launch_swiglu_tiles(const SwiGluArgs& of, const QuantizeArgs& args, bool rowwise,
                         const Execution& execution);

}  // namespace minifloat::cuda

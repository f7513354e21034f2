// The general casts: one direction, or the pairs of directions that layers use, from one read of x.
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

// Returns whether layers use the pair: weights and FP8 activations, which are the same format both
// ways; NVFP4's and MXFP4's activations, columnwise transformed; and gradients, stochastic and
// columnwise transformed.
bool is_pair_of_layers(const Spec& row, const Spec& col) {
  if (row.elements != col.elements || row.stochastic != col.stochastic) return false;
  if (row.elements != Elements::kE2m1)
    return !row.stochastic && row.transform == 0 && col.transform == 0;
  return row.stochastic ? col.transform > 0 : row.transform == 0;
}

template <class C>
bool launch_pair(const QuantizeArgs& args, const Execution& execution) {
  if (!is_cast<C>(args.row_spec) || !is_cast<C>(args.col_spec)) return false;
  launch_tiles<Bf16, C, C>(args, execution);
  return true;
}

}  // namespace

void launch_general(const QuantizeArgs& args, bool columnwise, const Execution& execution) {
  const Spec& spec = columnwise ? args.col_spec : args.row_spec;
  if (spec.reads_values()) return launch_general_reading_values(args, columnwise, execution);
  switch (spec.elements) {
    case Elements::kE4m3: return launch_cast<Cast<E4M3>>(args, columnwise, execution);
    case Elements::kE5m2: return launch_cast<Cast<E5M2>>(args, columnwise, execution);
    case Elements::kE2m1: return launch_cast<Cast<E2M1>>(args, columnwise, execution);
    case Elements::kBf16: return;
  }
}

bool launch_both(const QuantizeArgs& args, const Execution& execution) {
  if (!args.is_bf16 || !is_pair_of_layers(args.row_spec, args.col_spec)) return false;
  return launch_pair<Cast<E4M3>>(args, execution) || launch_pair<Cast<E5M2>>(args, execution) ||
         launch_pair<Cast<E2M1>>(args, execution);
}

}  // namespace minifloat::cuda

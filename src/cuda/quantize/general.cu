// The general casts: one direction, or the pairs of directions that layers use, from one read of x.
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

// Returns whether layers use the pair: weights and FP8 activations, which are the same format both
// ways; activations of 4 bits, transformed columnwise or both ways; and gradients, stochastic and
// columnwise transformed.
bool is_pair_of_layers(const Spec& row, const Spec& col) {
  if (row.elements != col.elements || row.stochastic != col.stochastic) return false;
  if (row.code_bits() == 8) return !row.stochastic && row.transform == 0 && col.transform == 0;
  return !row.stochastic || col.transform > 0;
}

template <class C>
LaunchCast find_pair_of(const QuantizeArgs& args) {
  return is_cast<C>(args.row_spec) && is_cast<C>(args.col_spec) ? launch_tiles<Bf16, C, C>
                                                                : nullptr;
}

}  // namespace

void launch_general(const QuantizeArgs& args, const Execution& execution) {
  const Spec& spec = args.columnwise ? args.col_spec : args.row_spec;
  if (spec.reads_values()) return launch_general_reading_values(args, execution);
  switch (spec.elements) {
    case Elements::kE4m3: return launch_cast<Cast<E4M3>>(args, execution);
    case Elements::kE5m2: return launch_cast<Cast<E5M2>>(args, execution);
    case Elements::kE2m1: return launch_cast<Cast<E2M1>>(args, execution);
    case Elements::kE1m2: return launch_cast<Cast<E1M2>>(args, execution);
    case Elements::kBf16: return;
  }
}

LaunchCast find_pair(const QuantizeArgs& args) {
  if (!args.is_bf16 || !is_pair_of_layers(args.row_spec, args.col_spec)) return nullptr;
  return first_of(args, find_pair_of<Cast<E4M3>>, find_pair_of<Cast<E5M2>>,
                  find_pair_of<Cast<E2M1>>, find_pair_of<Cast<E1M2>>);
}

}  // namespace minifloat::cuda

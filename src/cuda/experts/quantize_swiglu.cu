// Casts of h from gate and up, without h in memory: the choice of the kernel, and the amaxes that
// it needs.
#include "cuda/experts/quantize_swiglu.h"

#include "cuda/experts/experts.h"
#include "cuda/experts/found_amaxes.h"
#include "cuda/experts/swiglu.cuh"
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

bool launch(const QuantizeArgs& args, bool rowwise, bool columnwise, const void* context,
            const Execution& execution) {
  const SwiGluArgs& of = *static_cast<const SwiGluArgs*>(context);
  if (columnwise) return launch_swiglu_tiles(of, args, rowwise, &execution);
  return launch_swiglu_whole_rows(of, args, execution) || launch_swiglu_rows(of, args, execution);
}

// Returns whether a kernel casts h once its amaxes are found: those that quantize_by cannot leave
// to a cast. Groups have amaxes of their own.
bool fits_found_amaxes(const SwiGlu& of, const SwiGluArgs& args, const Operand* rowwise,
                       const Operand* columnwise) {
  constexpr std::int64_t kMostVecs = std::int64_t{1} << 30;
  if (of.groups || of.rows * of.width / kSwiGluVec > kMostVecs) return false;
  if (!columnwise)
    return rowwise->spec.rule == ScaleRule::kTensor && rowwise->spec.elements == Elements::kE4m3 &&
           !rowwise->spec.stochastic && rowwise->spec.transform == 0;
  const auto fits = [](const Operand* o) {
    return !o || o->spec.transform == 0 || (o->spec.transform == kVec && o->spec.has_blocks());
  };
  if (!fits(rowwise) || !fits(columnwise) || (rowwise && rowwise->spec.transform > 0)) return false;
  QuantizeArgs cast = {};
  cast.x.rows = of.rows, cast.x.cols = of.width;
  cast.col_spec = columnwise->spec;
  if (rowwise) cast.row_spec = rowwise->spec;
  return launch_swiglu_tiles(args, cast, rowwise != nullptr, nullptr);
}

}  // namespace

bool quantize_swiglu_in_one(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                            const Execution& execution) {
  const SwiGluArgs args = args_of(of);
  if (of.dtype != DType::kBFloat16 || of.width % kVec != 0 || !args.is_aligned) return false;
  const TensorRef h = of.h_at(of.gate);
  if (quantize_by(h, rowwise, columnwise, launch, &args, execution)) return true;
  if (!fits_found_amaxes(of, args, rowwise, columnwise)) return false;
  const SwiGluOperands to = {{nullptr, rowwise, nullptr}, {nullptr, columnwise, nullptr}};
  const FoundAmaxes amaxes(of.rows, of.width, to, execution);
  if (amaxes.is_empty()) return false;
  find_swiglu_amaxes(args, h, amaxes.amaxes(), execution);
  Operand row, col;
  if (rowwise) row = amaxes.given(*rowwise, 1, false);
  if (columnwise) col = amaxes.given(*columnwise, 1, true);
  return quantize_by(h, rowwise ? &row : nullptr, columnwise ? &col : nullptr, launch, &args,
                     execution);
}

}  // namespace minifloat::cuda

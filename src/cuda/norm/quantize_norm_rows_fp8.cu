// The rowwise casts of normalised values to FP8.
#include "cuda/norm/quantize_norm_rows.cuh"

namespace minifloat::cuda {

bool launch_norm_rows_fp8(const NormArgs& of, const QuantizeArgs& args,
                          const Execution* execution) {
  return launch_norm_rows<preset::Formats::kFp8>(of, args, execution);
}

}  // namespace minifloat::cuda

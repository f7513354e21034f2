// The rowwise casts of normalised values to FP4.
#include "cuda/norm/quantize_norm_rows.cuh"

namespace minifloat::cuda {

bool launch_norm_rows_fp4(const NormArgs& of, const QuantizeArgs& args,
                          const Execution* execution) {
  return launch_norm_rows<preset::Formats::kWithFp4>(of, args, execution);
}

}  // namespace minifloat::cuda

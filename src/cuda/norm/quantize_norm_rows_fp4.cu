// The rowwise casts of normalised values to FP4.
#include "cuda/norm/quantize_norm_rows.cuh"

namespace minifloat::cuda {

bool launch_norm_rows_fp4(const NormArgs& of, const QuantizeArgs& args,
                          const Execution* execution) {
  using namespace preset;
  if (execution && !is_run(args)) return false;
  return try_rows<Mxfp4::Straight>(of, args, execution) ||
         try_rows<Nvfp4::Straight>(of, args, execution) ||
         try_rows<Nvfp4Pow2::Straight>(of, args, execution);
}

}  // namespace minifloat::cuda

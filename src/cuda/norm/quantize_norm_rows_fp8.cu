// The rowwise casts of normalised values to FP8.
#include "cuda/norm/quantize_norm_rows.cuh"

namespace minifloat::cuda {

bool launch_norm_rows_fp8(const NormArgs& of, const QuantizeArgs& args,
                          const Execution* execution) {
  using namespace preset;
  if (execution && !is_run(args)) return false;
  return try_rows<Nearest<kTensor, E4M3>>(of, args, execution) ||
         try_rows<Nearest<kRow, E4M3>>(of, args, execution) ||
         try_rows<Nearest<kBlock, E4M3>>(of, args, execution) ||
         try_rows<Mxfp8>(of, args, execution);
}

}  // namespace minifloat::cuda

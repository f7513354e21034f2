#include "cuda/experts/quantize_gradients.cuh"

namespace minifloat::cuda {

bool launch_gradients_fp8(const GradientSpecs& specs, const GradientArgs& args,
                          const GradientPlans* plans, const Execution& execution) {
  using namespace preset;
  using Tensor = Nearest<kTensor, E5M2>;
  using Row = Nearest<kRow, E4M3>;
  using Block = Nearest<kBlock, E4M3>;
  return try_gradients<Tensor, Tensor, Nearest<kTensor, E4M3>>(specs, args, plans, execution) ||
         try_gradients<Row, Row, Row>(specs, args, plans, execution) ||
         try_gradients<Block, Block, Block>(specs, args, plans, execution) ||
         try_gradients<Mxfp8, Mxfp8, Mxfp8>(specs, args, plans, execution);
}

}  // namespace minifloat::cuda

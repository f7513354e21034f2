#include "cuda/experts/quantize_gradients.cuh"

namespace minifloat::cuda {

bool launch_gradients_fp4(const GradientSpecs& specs, const GradientArgs& args,
                          const GradientPlans* plans, const Execution& execution) {
  using namespace preset;
  if (specs.as_fp8)
    return try_gradients<AsFp8<Nvfp4Pow2::Random>, AsFp8<Nvfp4Pow2::TransformedRandom>,
                         AsFp8<Nvfp4Pow2::Transformed>>(specs, args, plans, execution);
  const auto try_nvfp4 = [&]<class Casts>() {
    return try_gradients<typename Casts::Random, typename Casts::TransformedRandom,
                         typename Casts::Transformed>(specs, args, plans, execution);
  };
  return try_gradients<Mxfp4::TransformedRandom, Mxfp4::TransformedRandom, Mxfp4::Transformed>(
             specs, args, plans, execution) ||
         try_nvfp4.template operator()<Nvfp4>() || try_nvfp4.template operator()<Nvfp4Pow2>();
}

}  // namespace minifloat::cuda

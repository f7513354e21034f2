// A kernel for each row of the table in src/cuda/common/ptx.cuh, compiled by test_targets.py for
// every target. Kernels are named by their row.
#include "cuda/codec/encode.cuh"
#include "cuda/codec/scale.cuh"

namespace minifloat::cuda {

extern "C" __global__ void magnitudes(float* x) { x[0] = clamp_magnitude(x[1], x[2]); }
extern "C" __global__ void to_fp8(const float* x, std::uint32_t* codes) {
  codes[0] = cvt_e4m3x2(x[0], x[1]);
  codes[1] = cvt_e5m2x2(x[0], x[1]);
}
extern "C" __global__ void from_fp8(const std::uint32_t* codes, float2* x) {
  x[0] = decode_e4m3x2(codes[0]);
  x[1] = decode_e5m2x2(codes[1]);
}
extern "C" __global__ void bf16_products(std::uint32_t* x) { x[0] = mul_bf16x2(x[1], x[2]); }
extern "C" __global__ void clusters() { sync_cluster(); }
extern "C" __global__ void to_e2m1(const float* x, std::uint32_t* codes) {
  codes[0] = encode_e2m1x8(x, codes[1]);
}
extern "C" __global__ void to_e8m0(std::uint32_t* code) {
  code[0] = DeviceEquations::mx_code<E4M3>(code[1]);
}
extern "C" __global__ void to_e2m1_stochastic(const Vec16<float>* x, const RandomBits* bits,
                                              Codes<E2M1>* codes) {
  codes[0] = encode_e2m1_stochastic(x[0], 1.0f, true, bits[0]);
}
extern "C" __global__ void to_fp8_stochastic(const Vec16<float>* x, const RandomBits* bits,
                                             Codes<E4M3>* codes) {
  codes[0] = encode_fp8_stochastic<E4M3>(x[0], 1.0f, bits[0]);
}

}  // namespace minifloat::cuda

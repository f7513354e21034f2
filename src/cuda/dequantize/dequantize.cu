// Codes -> values, by rows of vec16s.
//
//     bytes an element: 1 or 1/2 of codes, a block's scale, 2 or 4 of values
#include "cuda/backend.h"
#include "cuda/common/launch.h"
#include "cuda/quantize/cast_vec16.cuh"

namespace minifloat::cuda {
namespace {

struct DecodeArgs {
  ScaleRule rule;
  bool is_scaled_after_product;  // codes alone are decoded: their row scale is no power of two
  int height_log2, width_log2;   // of a block
  const std::uint8_t* codes;
  const void* scale;
  const float* factor;  // (Quantized::factors): the tensor scales; null: for a product
  bool has_factors_of_rows;
  void* out;  // bf16 or fp32 (batch, rows, padded)
  std::uint32_t padded, pitch, scale_rows, scale_cols;
  bool aligned_in, aligned_out;
  const std::int32_t* boundaries;  // of groups among rows or columns; null: there are no groups
  int groups;
  bool along_cols;
  std::uint32_t rows;
  RowVecs layout;
};

// Finds the group of a vec16, where its scales depend on that. Returns false past the last group.
__device__ __forceinline__ bool find_group(const DecodeArgs& args, Place& at) {
  const std::uint32_t i = args.along_cols ? at.col : at.all;
  if (i >= static_cast<std::uint32_t>(__ldg(args.boundaries + args.groups))) return false;
  if (args.factor || (outer_scale(args.rule) == OuterScale::kRow && args.along_cols))
    at.batch = static_cast<std::uint32_t>(
        group_at(args.boundaries, args.groups, static_cast<std::int32_t>(i)));
  if (args.along_cols) at.all = at.batch * args.rows + at.row;
  return true;
}

__device__ __forceinline__ float scale_at(const DecodeArgs& args, const Place& at) {
  if (args.scale_cols == 0)
    return args.rule == ScaleRule::kRow && !args.is_scaled_after_product
               ? static_cast<const float*>(args.scale)[at.all]
               : 1.0f;
  const std::uint64_t row = args.height_log2 == 0 ? at.line
                                                  : std::uint64_t{at.batch} * args.scale_rows +
                                                        (at.row >> args.height_log2);
  const std::uint64_t i = row * args.scale_cols + (at.col >> args.width_log2);
  if (args.rule == ScaleRule::kBlock) return static_cast<const float*>(args.scale)[i];
  const std::uint32_t code = static_cast<const std::uint8_t*>(args.scale)[i];
  return args.rule == ScaleRule::kMx ? decode_e8m0(code) : decode_e4m3(code);
}

template <class F>
__device__ __forceinline__ Codes<F> load_codes(const DecodeArgs& args, const Place& at) {
  Codes<F> codes = {};
  const std::uint8_t* from =
      args.codes + std::uint64_t{at.line} * args.pitch + (F::kBits == 8 ? at.col : at.col / 2);
  const int left = static_cast<int>(min(args.padded - at.col, std::uint32_t{kVec}));
  if (args.aligned_in && left == kVec) {
    if constexpr (F::kBits == 8) {
      const uint4 w = __ldg(reinterpret_cast<const uint4*>(from));
      codes.w[0] = w.x, codes.w[1] = w.y, codes.w[2] = w.z, codes.w[3] = w.w;
    } else {
      const uint2 w = __ldg(reinterpret_cast<const uint2*>(from));
      codes.w[0] = w.x, codes.w[1] = w.y;
    }
    return codes;
  }
#pragma unroll
  for (int i = 0; i < kVec; i += 8 / F::kBits)
    if (i < left)
      codes.w[i * F::kBits / 32] |= static_cast<std::uint32_t>(from[i * F::kBits / 8])
                                    << (i * F::kBits % 32);
  return codes;
}

// Returns the output's value: the NaN is the same on every device.
__device__ __forceinline__ float canonical(float v) { return v == v ? v : nan_value(); }

// Stores code * scale * factor.
template <class F, class Out>
__device__ __forceinline__ void store_scaled(const Codes<F>& codes, float scale, float factor,
                                             Out* row, std::uint32_t col, std::uint32_t end,
                                             bool aligned) {
  const bool finite =
      is_finite(magnitude_bits(scale)) && is_finite(magnitude_bits(factor)) && !has_special(codes);
  store_values<F>(
      codes, aligned && finite, row, col, end,
      [&](auto& w) {
        const auto both = [&](float low, float high) {
          return cvt_bf16x2(low * scale * factor, high * scale * factor);
        };
        if constexpr (F::kBits == 4 && sizeof(Out) == 2) {
          look_up(bf16_table_of<F>(both), codes, w);
        } else {
          float v[kVec];
          decode_vec<F>(codes, v);
#pragma unroll
          for (int i = 0; i < kVec * static_cast<int>(sizeof(Out)) / 4; ++i) {
            if constexpr (sizeof(Out) == 2)
              w[i] = both(v[2 * i], v[2 * i + 1]);
            else
              w[i] = bit_cast<std::uint32_t>(v[i] * scale * factor);
          }
        }
      },
      [&](std::uint32_t code) {
        const float value = canonical(decode<F>(code) * scale * factor);
        if constexpr (sizeof(Out) == 2)
          return static_cast<Bf16>(encode_bf16(value));
        else
          return value;
      });
}

template <class F, class Out>
__global__ void __launch_bounds__(kThreads, 6)
    decode_codes(const __grid_constant__ DecodeArgs args) {
  Place at = vec_place(args.layout, blockIdx.x * kThreads + threadIdx.x);
  if (at.all >= args.layout.end_row) return;
  if (args.boundaries && !find_group(args, at)) return;
  const Codes<F> codes = load_codes<F>(args, at);
  const float scale = scale_at(args, at);
  Out* row = static_cast<Out*>(args.out) + std::uint64_t{at.line} * args.padded;
  if constexpr (sizeof(Out) == 2)
    if (!args.factor)
      return store_product_values<F>(codes, scale, row, at.col, args.padded, args.aligned_out);
  store_scaled<F>(codes, scale, args.factor[args.has_factors_of_rows ? at.all : at.batch], row,
                  at.col, args.padded, args.aligned_out);
}

template <class Out>
void launch_decode(DecodeArgs args, const Quantized& q, cudaStream_t stream) {
  if (q.batch * q.rows * args.padded == 0) return;
  const KernelInput shape = {nullptr, 0, 0, q.rows, q.cols, false, nullptr};
  each_launch_of_rows<1>(q.batch, shape, args.padded, 1, [&](const RowVecs& layout, unsigned grid) {
    args.layout = layout;
    switch (q.spec.elements) {
      case Elements::kE4m3: decode_codes<E4M3, Out><<<grid, kThreads, 0, stream>>>(args); break;
      case Elements::kE5m2: decode_codes<E5M2, Out><<<grid, kThreads, 0, stream>>>(args); break;
      case Elements::kE2m1: decode_codes<E2M1, Out><<<grid, kThreads, 0, stream>>>(args); break;
      case Elements::kE1m2: decode_codes<E1M2, Out><<<grid, kThreads, 0, stream>>>(args); break;
      case Elements::kBf16: return;
    }
    check_launch("dequantize");
  });
}

DecodeArgs args_of(const Quantized& q, const float* factor, void* out, std::int64_t size) {
  const Spec& spec = q.spec;
  const std::int64_t padded = spec.padded_cols(q.cols), pitch = spec.code_cols(q.cols);
  MINIFLOAT_CHECK(q.batch * q.rows < std::int64_t{1} << 31 && padded < std::int64_t{1} << 31,
                  "dequantize: expected less than 2^31 rows in all and 2^31 columns, got ",
                  q.batch * q.rows, " and ", padded);
  DecodeArgs args = {};
  args.rule = spec.rule;
  args.is_scaled_after_product = !factor && is_scaled_after_product(spec.rule, spec.scale_rounding);
  args.codes = q.codes, args.scale = q.scale, args.factor = factor, args.out = out;
  args.has_factors_of_rows = spec.has_outer_row_amax();
  args.padded = static_cast<std::uint32_t>(padded);
  args.pitch = static_cast<std::uint32_t>(pitch);
  args.rows = static_cast<std::uint32_t>(q.rows);
  args.boundaries = q.groups ? q.groups.under(q.groups.unit) : nullptr;
  args.groups = q.groups.count;
  args.along_cols = q.groups.unit > 0;
  if (spec.has_blocks()) {
    args.height_log2 = __builtin_ctz(static_cast<unsigned>(spec.block_rows));
    args.width_log2 = __builtin_ctz(static_cast<unsigned>(spec.block_cols));
    args.scale_rows = static_cast<std::uint32_t>(spec.scale_rows(q.rows));
    args.scale_cols = static_cast<std::uint32_t>(spec.scale_cols(q.cols));
  }
  const auto bytes = static_cast<std::uint32_t>(kVec * spec.code_bits() / 8);
  args.aligned_in = pitch % bytes == 0 && reinterpret_cast<std::uintptr_t>(q.codes) % bytes == 0;
  args.aligned_out = padded * size % 16 == 0 && reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
  return args;
}

struct FactorArgs {
  Spec spec;
  const float* scale;
  const float* amax;
  std::int64_t count;
};

FactorArgs factor_args(const Quantized& q) {
  return {q.spec, static_cast<const float*>(q.scale), q.amax, q.factors()};
}

// Returns the tensor scale of matrix, group or row e; 1 under a rule without one.
__device__ __forceinline__ float tensor_factor_at(const FactorArgs& args, std::int64_t e) {
  if (args.spec.rule == ScaleRule::kTensor) return args.scale[e];
  if (block_rule(args.spec.rule) == BlockRule::kE4m3)
    return scale_above_blocks(args.spec, args.amax[e]);
  return 1.0f;
}

__global__ void write_tensor_factor(const __grid_constant__ FactorArgs args, float* out) {
  const std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e < args.count) out[e] = tensor_factor_at(args, e);
}

// Writes beta and alpha of a product, by one thread.
__global__ void write_product_factor(const __grid_constant__ FactorArgs a,
                                     const __grid_constant__ FactorArgs b, float* out) {
  out[0] = 0.0f;
  out[1] = tensor_factor_at(a, 0) * tensor_factor_at(b, 0);
}

}  // namespace

void tensor_factor(const Quantized& q, float* out, const Execution& execution) {
  if (q.factors() == 0) return;
  constexpr std::int64_t kBlock = 128;
  write_tensor_factor<<<grid_of(ceil_div(q.factors(), kBlock), "tensor_factor"), kBlock, 0,
                        cuda_stream(execution)>>>(factor_args(q), out);
  check_launch("tensor_factor");
}

void product_factor(const Quantized& a, const Quantized& b, float* out,
                    const Execution& execution) {
  write_product_factor<<<1, 1, 0, cuda_stream(execution)>>>(factor_args(a), factor_args(b), out);
  check_launch("product_factor");
}

void dequantize(const Quantized& q, DType dtype, void* out, const Execution& execution) {
  const Scratch factor(static_cast<std::size_t>(q.factors()) * sizeof(float), execution);
  cuda::tensor_factor(q, factor.as<float>(), execution);
  if (dtype == DType::kFloat32)
    launch_decode<float>(args_of(q, factor.as<float>(), out, 4), q, cuda_stream(execution));
  else
    launch_decode<Bf16>(args_of(q, factor.as<float>(), out, 2), q, cuda_stream(execution));
}

void decode_for_product(const Quantized& q, std::uint16_t* out, const Execution& execution) {
  launch_decode<Bf16>(args_of(q, nullptr, out, 2), q, cuda_stream(execution));
}

}  // namespace minifloat::cuda

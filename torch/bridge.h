// From torch's tensors, strings and errors to the torch-free API's.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>

#include "minifloat/error.h"
#include "minifloat/recipe.h"
#include "minifloat/tensor_ref.h"

namespace minifloat::bridge {

// Runs f; a minifloat::Error leaves as c10::ValueError, which Python sees as ValueError.
template <class F>
decltype(auto) with_value_errors(F&& f) {
  try {
    return f();
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

inline Spec parse_spec(const std::string& text) {
  return with_value_errors([&] { return Spec::parse(text); });
}
inline Product parse_product(const std::string& text) {
  return with_value_errors([&] { return Product::parse(text); });
}

// Torch's own thread pool, so that torch.set_num_threads holds here too.
inline void torch_parallel_for(std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t),
                               void* context) {
  at::parallel_for(0, count, 1,
                   [&](std::int64_t begin, std::int64_t end) { body(context, begin, end); });
}
inline Execution cpu_execution() { return {.parallel_for = torch_parallel_for}; }

// What every op that reads values asks of its input.
inline void check_values(const char* op, const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, op,
                    ": expected x in float32 or bfloat16, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, op,
                    ": expected x of shape (rows, cols) or (batch, rows, cols), got ", x.dim(),
                    " dimensions");
}

// x as a batch of row-major matrices; a layout that would need a copy is refused, not copied.
inline TensorRef tensor_ref(const char* op, const at::Tensor& x) {
  check_values(op, x);
  TORCH_CHECK_VALUE(x.numel() == 0 || x.size(-1) == 1 || x.stride(-1) == 1, op,
                    ": expected x with adjacent columns (stride 1), got strides ", x.strides(),
                    "; pass x.contiguous(), or quantize the transpose with columnwise=True");
  TensorRef ref;
  ref.data = x.const_data_ptr();
  ref.dtype = x.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBFloat16;
  ref.batch = x.dim() == 3 ? x.size(0) : 1;
  ref.rows = x.size(-2);
  ref.cols = x.size(-1);
  ref.batch_stride = x.dim() == 3 ? x.stride(0) : 0;
  ref.row_stride = x.stride(-2);
  return ref;
}

}  // namespace minifloat::bridge

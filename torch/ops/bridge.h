// Conversions from torch to the torch-free API: tensors, strings, errors, threads and streams.
#pragma once

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "minifloat/error.h"
#include "minifloat/recipe.h"
#include "minifloat/tensor_ref.h"
#include "ops/checks.h"

namespace minifloat::bridge {

// Runs f. Converts a minifloat::Error to c10::ValueError, which Python sees as ValueError, and
// std::bad_alloc to torch's OutOfMemoryError.
template <class F>
decltype(auto) with_value_errors(F&& f) {
  try {
    return f();
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const std::bad_alloc&) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "minifloat: not enough host memory for the call");
  }
}

// Parses a text once for each thread: a model has few texts and makes many calls.
template <class Parsed>
const Parsed& parse_once(const std::string& text) {
  static thread_local std::unordered_map<std::string, Parsed> cache;
  if (const auto found = cache.find(text); found != cache.end()) return found->second;
  return cache.emplace(text, with_value_errors([&] { return Parsed::parse(text); })).first->second;
}
inline const Spec& parse_spec(const std::string& text) { return parse_once<Spec>(text); }
inline const Product& parse_product(const std::string& text) { return parse_once<Product>(text); }

// Runs body on torch's thread pool, so that torch.set_num_threads applies.
inline void torch_parallel_for(std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t),
                               void* context) {
  at::parallel_for(0, count, 1,
                   [&](std::int64_t begin, std::int64_t end) { body(context, begin, end); });
}

inline Device backend_of(const at::Tensor& x) { return x.is_cuda() ? Device::kCuda : Device::kCpu; }

// The execution of an op on x. On the CPU: torch's threads. On CUDA: x's device, which stays
// current for the object's lifetime; torch's current stream there; and scratch from torch's
// allocator. The destructor frees the scratch: the allocator reuses memory in stream order. Only
// c10's device interface is called, so that no CUDA library is linked.
class ExecutionOn {
 public:
  explicit ExecutionOn(const at::Tensor& x) : options_(x.options().dtype(at::kByte)) {
    if (!x.is_cuda()) {
      execution_.parallel_for = torch_parallel_for;
      return;
    }
    guard_.reset_device(x.device());
    const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
    execution_.stream = cuda.getStreamNativeHandle(cuda.getStream(x.device()));
    execution_.allocate = [](std::size_t bytes, void* self) {
      return static_cast<ExecutionOn*>(self)->allocate(bytes);
    };
    execution_.allocate_context = this;
  }
  ExecutionOn(const ExecutionOn&) = delete;
  ExecutionOn& operator=(const ExecutionOn&) = delete;

  operator const Execution&() const { return execution_; }

 private:
  void* allocate(std::size_t bytes) {
    scratch_.push_back(at::empty({static_cast<std::int64_t>(bytes)}, options_));
    return scratch_.back().mutable_data_ptr();
  }

  at::TensorOptions options_;
  c10::OptionalDeviceGuard guard_;
  std::vector<at::Tensor> scratch_;
  Execution execution_;
};

// Returns x as a batch of row-major matrices. Raises for a layout that would need a copy.
inline TensorRef tensor_ref(const char* op, const at::Tensor& x) {
  check_values(op, x);
  check_memory(op, "x", x);
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
  ref.device = backend_of(x);
  return ref;
}

}  // namespace minifloat::bridge

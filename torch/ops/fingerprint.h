// A 64-bit hash of a tensor's bytes, which shows writes that torch does not count.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace minifloat::torch_ops {

// Returns the hash. t: contiguous, in the CPU's memory
std::uint64_t fingerprint_of(const at::Tensor& t);

}  // namespace minifloat::torch_ops

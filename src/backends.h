// The functions that both backends have, once: those of minifloat/quantize.h, transform.h,
// partial_cast.h, experts.h and messages.h after the checks. The namespace cpu has them on host
// memory, cuda on device memory and on execution.stream, without a wait for the device or a number
// copied to the host. on_device.h chooses.
#pragma once

#include "minifloat/experts.h"
#include "minifloat/messages.h"
#include "minifloat/partial_cast.h"
#include "minifloat/quantize.h"
#include "minifloat/transform.h"

namespace minifloat {

// A function of a batch, whose device is chosen already.
template <class Item>
using BatchFunction = void(std::span<const Item>, const Execution&);

}  // namespace minifloat

// A function without a signature here has that of the public one. core/ has others of the names
// fp4_as_fp8, hadamard, swiglu and swiglu_backward.
#define MINIFLOAT_BACKEND(backend)                                                                 \
  namespace minifloat::backend {                                                                   \
  decltype(minifloat::amax) amax;                                                                  \
  decltype(minifloat::quantize) quantize;                                                          \
  decltype(minifloat::dequantize) dequantize;                                                      \
  decltype(minifloat::decode_for_product) decode_for_product;                                      \
  decltype(minifloat::tensor_factor) tensor_factor;                                                \
  decltype(minifloat::product_factor) product_factor;                                              \
  decltype(minifloat::swizzle_scales) swizzle_scales;                                              \
  decltype(minifloat::unswizzle_scales) unswizzle_scales;                                          \
  decltype(minifloat::transpose_nibbles) transpose_nibbles;                                        \
  decltype(minifloat::swiglu_backward_with_amaxes) swiglu_backward_with_amaxes;                    \
  decltype(minifloat::quantize_swiglu) quantize_swiglu;                                            \
  decltype(minifloat::quantize_swiglu_backward) quantize_swiglu_backward;                          \
  decltype(minifloat::take_rows) take_rows;                                                        \
  decltype(minifloat::pack_rows) pack_rows;                                                        \
  decltype(minifloat::add_slots) add_slots;                                                        \
  BatchFunction<Fp4AsFp8Cast> fp4_as_fp8;                                                          \
  BatchFunction<PartialCast> partial_amax, choose_scales, partial_cast;                            \
  BatchFunction<Transpose> transpose_many;                                                         \
  BatchFunction<Copy> copy_many;                                                                   \
  void hadamard(const TensorRef& x, int points, bool columnwise, std::uint32_t signs,              \
                std::uint16_t* out, const Execution& execution);                                   \
  void swiglu(const SwiGlu& of, void* h, const Execution& execution);                              \
  void swiglu_backward(const SwiGlu& of, const SwiGluGradients& gradients,                         \
                       const Execution& execution);                                                \
  void sum_messages(const Messages& messages, const MessageLayout& layout, DType dtype, void* out, \
                    const Execution& execution);                                                   \
  }
MINIFLOAT_BACKEND(cpu)
MINIFLOAT_BACKEND(cuda)
#undef MINIFLOAT_BACKEND

// gather_memory: the call from an op that finds freed memory to the gathers of FSDP2.
#include <ATen/core/dispatch/Dispatcher.h>

#include "ops/checks.h"

namespace minifloat::bridge {

void gather_memory(const at::Tensor& t) {
  // Looked up in each call: Python defines the op where FSDP2 is used.
  const auto op = c10::Dispatcher::singleton().findSchema({"minifloat_fsdp::gather_memory", ""});
  if (op) op->typed<void(const at::Tensor&)>().call(t);
}

}  // namespace minifloat::bridge

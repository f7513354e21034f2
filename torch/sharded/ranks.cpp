#include "sharded/ranks.h"

#include <c10/util/Exception.h>

#include <exception>
#include <vector>

namespace minifloat::torch_ops {

void all_reduce(const Ranks& ranks, const at::Tensor& t, c10d::ReduceOp::RedOpType op,
                const char* what) {
  std::vector<at::Tensor> tensors = {t};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  try {
    ranks->allreduce(tensors, options)->wait();
  } catch (const std::exception& error) {
    const auto* torchs = dynamic_cast<const c10::Error*>(&error);
    TORCH_CHECK_WITH(DistBackendError, false, "quantize_master_weights: the all-reduce of ", what,
                     " has failed on rank ", ranks->getRank(), " of ", ranks->getSize(), ": ",
                     torchs ? torchs->what_without_backtrace() : error.what());
  }
}

}  // namespace minifloat::torch_ops

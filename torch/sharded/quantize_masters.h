// The cast of a list of weights whose masters are sharded over ranks, for ZeRO.
#pragma once

#include <string>
#include <vector>

#include "sharded/rank_agreement.h"

namespace minifloat::torch_ops {

// Quantizes masters: amaxes -> all-reduce -> codes, scales, amax. Under rules that read values, the
// choices of scales come between: values of split blocks -> all-reduce -> choices -> all-reduce.
// names: of the casts' weights; group: its name in torch.distributed, "" for a process without
// ranks. Without casts the ranks agree that none has any.
void quantize_masters(std::vector<PartialCast>& casts, const std::vector<std::string>& names,
                      const std::string& group, Agreement& agreement, const at::Tensor& like);

}  // namespace minifloat::torch_ops

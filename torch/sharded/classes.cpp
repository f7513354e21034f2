// The classes of this folder as torch and Python see them. In one file: a class is registered before those whose methods
// take it.
#include <torch/custom_class.h>
#include <torch/library.h>

#include "sharded/master_lists.h"
#include "sharded/rank_agreement.h"
#include "sharded/shard_cast.h"

namespace minifloat::torch_ops {

TORCH_LIBRARY_FRAGMENT(minifloat, m) {
  m.class_<ShardCast>("ShardCast")
      .def(torch::init<const std::string&, bool, std::int64_t, std::int64_t, bool>());
  m.class_<Agreement>("Agreement").def(torch::init<>());
  m.class_<MasterCasts>("MasterCasts")
      .def(torch::init<ShardCasts, Numbers, Texts, Tensors, Tensors, Tensors,
                       c10::intrusive_ptr<Agreement>>())
      .def("quantize", &MasterCasts::quantize);
  m.class_<MatrixTransposes>("MatrixTransposes")
      .def(torch::init<Tensors, Tensors, Numbers>())
      .def("run", &MatrixTransposes::run);
}

}  // namespace minifloat::torch_ops

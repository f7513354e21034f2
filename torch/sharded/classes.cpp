// Registers the classes of this folder, for torch and Python. One file, because a class must be
// registered before another class whose methods take it.
#include <torch/custom_class.h>
#include <torch/library.h>

#include "sharded/gather_batch.h"
#include "sharded/master_lists.h"
#include "sharded/rank_agreement.h"
#include "sharded/shard_cast.h"

namespace minifloat::torch_ops {

TORCH_LIBRARY_FRAGMENT(minifloat, m) {
  m.class_<ShardCast>("ShardCast")
      .def(torch::init<const std::string&, bool, std::int64_t, std::int64_t, bool>())
      .def("fits", [](const c10::intrusive_ptr<ShardCast>& self,
                      std::int64_t world) { return RowShard(*self, world, 0).fits(); })
      .def("chunk_bytes",
           [](const c10::intrusive_ptr<ShardCast>& self, std::int64_t world) {
             return RowShard(*self, world, 0).chunk_bytes();
           })
      .def("has_common_scale",
           [](const c10::intrusive_ptr<ShardCast>& self) {
             return RowShard(*self, 1, 0).has_common_scale();
           })
      .def("new_operand", [](const c10::intrusive_ptr<ShardCast>& self, const at::Tensor& like) {
        return self->new_operand(like);
      });
  m.class_<Agreement>("Agreement").def(torch::init<>());
  m.class_<ReadyCasts>("ReadyCasts").def("run", &ReadyCasts::run);
  m.class_<MasterCasts>("MasterCasts")
      .def(torch::init<const ShardCasts&, const Numbers&, const Texts&, const Tensors&,
                       const Tensors&, const Tensors&>())
      .def("check", [](const c10::intrusive_ptr<MasterCasts>& self, const Tensors& masters,
                       const Numbers& starts, const Tensors& fragments) {
        return MasterCasts::check(self, masters, starts, fragments);
      });
  m.class_<MatrixTransposes>("MatrixTransposes")
      .def(torch::init<const Tensors&, const Tensors&, const Numbers&>())
      .def("run", &MatrixTransposes::run);
  m.class_<GatherBatch>("GatherBatch")
      .def(torch::init<const ShardCasts&, const ShardCasts&, const Texts&, std::int64_t,
                       std::int64_t>())
      .def("exchanged", &GatherBatch::exchanged)
      .def("hold_shards", &GatherBatch::hold_shards)
      .def("hold_targets", &GatherBatch::hold_targets)
      .def("hold_outputs", &GatherBatch::hold_outputs)
      .def("count_writes", &GatherBatch::count_writes)
      .def("is_written", &GatherBatch::is_written)
      .def("cast", &GatherBatch::cast)
      .def("fill", &GatherBatch::fill);
  m.class_<AmaxExchange>("AmaxExchange")
      .def(torch::init<std::vector<c10::intrusive_ptr<GatherBatch>>>())
      .def("measure", &AmaxExchange::measure)
      .def("accept", &AmaxExchange::accept);
}

}  // namespace minifloat::torch_ops

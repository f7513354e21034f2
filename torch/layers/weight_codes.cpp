#include "layers/weight_codes.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>

#include "layers/arguments.h"
#include "ops/bridge.h"
#include "ops/fingerprint.h"

namespace minifloat {
namespace torch_ops {
namespace {

std::atomic<std::int64_t> steps_taken = 0;  // by this process's optimizers, except compiled steps

// The caches of the process by their ids.
struct Caches {
  std::mutex mutex;
  std::int64_t last_id = 0;
  std::unordered_map<std::int64_t, c10::weak_intrusive_ptr<WeightCodes>> of_id;
};
Caches& caches() {
  static auto* const all = new Caches;  // layers may outlive static objects
  return *all;
}

std::uint32_t write_version(const Tensor& t) { return t.is_inference() ? 0 : t._version(); }

bool is_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// Casts a weight by the op, which autocast sees too.
std::vector<Tensor> cast_weight(const WeightRead& read, bool rowwise, bool columnwise) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("minifloat::layer_operands", "");
  const Sharding& of = read.sharding;
  const c10::IValue none;
  torch::jit::Stack stack = {
      read.matrix, read.recipe,   "w",  rowwise, columnwise, read.amax_history, of.group, of.rank,
      of.ranks,    of.weight_dim, none, none,    none};
  op.callBoxed(&stack);
  return stack.front().toTensorVector();
}

}  // namespace

c10::intrusive_ptr<WeightCodes> WeightCodes::make(bool compares_bytes) {
  Caches& all = caches();
  const std::lock_guard lock(all.mutex);
  auto made = c10::make_intrusive<WeightCodes>(++all.last_id, compares_bytes);
  all.of_id.emplace(made->id_, made);
  return made;
}

c10::intrusive_ptr<WeightCodes> WeightCodes::find(std::int64_t id) {
  if (id == 0) return {};
  const std::lock_guard lock(caches().mutex);
  const auto found = caches().of_id.find(id);
  auto cache =
      found == caches().of_id.end() ? c10::intrusive_ptr<WeightCodes>() : found->second.lock();
  TORCH_CHECK_VALUE(cache, "linear: expected weight_cache as the id of a cache, or 0, got ", id);
  return cache;
}

void WeightCodes::release_resources() {
  forget();
  const std::lock_guard lock(caches().mutex);
  caches().of_id.erase(id_);
}

void WeightCodes::forget() {
  std::shared_ptr<const Codes> freed;
  const std::lock_guard lock(mutex_);
  freed = std::move(codes_);
  last_.reset();
}

void WeightCodes::start_over() {
  forget();
  const std::lock_guard lock(mutex_);
  is_reused_ = false;
}

void WeightCodes::capture() {
  std::shared_ptr<const Codes> freed;
  const std::lock_guard lock(mutex_);
  is_captured_ = true;
  freed = std::move(codes_);
}

std::optional<std::vector<Tensor>> WeightCodes::held() const {
  std::shared_ptr<const Codes> codes;
  {
    const std::lock_guard lock(mutex_);
    codes = codes_;
  }
  return codes ? std::optional(codes->tensors) : std::nullopt;
}

WeightCodes::Key WeightCodes::key_of(const WeightRead& read) {
  const Tensor &matrix = read.matrix, &x = read.x;
  const c10::DeviceType device = x.device().type();
  const auto stream = [&] {
    return c10::impl::VirtualGuardImpl(device).getStream(x.device()).id();
  };
  return {.state = {.weight = read.weight.unsafeGetTensorImpl(),
                    .storage = matrix.storage().unsafeGetStorageImpl(),
                    .version = write_version(read.weight),
                    .matrix_version = write_version(matrix),
                    .offset = matrix.storage_offset(),
                    .sizes = c10::DimVector(matrix.sizes()),
                    .strides = c10::DimVector(matrix.strides()),
                    .steps = steps_taken,
                    .recipe = &prepare(read.recipe)},
          .dtype = is_autocast(x) ? at::autocast::get_autocast_dtype(device) : x.scalar_type(),
          .is_inference = c10::InferenceMode::is_enabled(),
          .stream = x.is_cuda() ? stream() : 0,
          .fingerprint = read.fingerprint};
}

// Between two micro-batches of a step exactly one backward pass adds to the weight's gradient, in
// place. Views of one buffer share its count of writes: what other weights add hides that. A
// recomputed forward finds the gradient as the forward before did.
bool WeightCodes::is_next_micro_batch(const Gradient& before, const Gradient& now) {
  if (before == now && is_in_backward()) return true;
  if (!before) return now.has_value();
  return now == std::pair(before->first, before->second + 1);
}

WeightCodes::Gradient WeightCodes::gradient_of(const WeightRead& read) {
  // A copy: another thread may replace the gradient.
  const Tensor grad = read.main_grad ? *read.main_grad : read.weight.unsafeGetTensorImpl()->grad();
  if (!grad.defined() || grad.is_inference()) return std::nullopt;
  return std::pair(grad.unsafeGetTensorImpl(), write_version(grad));
}

bool WeightCodes::is_second_use(const WeightRead& read, const Key& key, bool is_shown,
                                const Gradient& gradient) {
  if (is_captured_) return false;
  const bool is_in_step = read.training && at::GradMode::is_enabled();
  if (!is_in_step && !is_shown) {
    last_.reset();
    is_reused_ = false;
    return false;
  }
  bool is_same_use = last_ && last_->key == key;
  if (!is_shown) {
    is_same_use = is_same_use && is_next_micro_batch(gradient_, gradient);
    gradient_ = gradient;
  }
  const bool was_reused = std::exchange(is_reused_, is_same_use);
  if (is_same_use) return true;
  last_ = Use{key, read.matrix.storage().getWeakStorageImpl()};
  return was_reused;
}

std::optional<std::vector<Tensor>> WeightCodes::operands(const WeightRead& read) {
  const Tensor &weight = read.weight, &x = read.x;
  const bool has_values = (x.is_cpu() || x.is_cuda()) && read.matrix.has_storage();
  if (!has_values || weight.is_inference()) return std::nullopt;
  // Outside autocast a weight of another dtype has a gradient of its own dtype.
  if (weight.scalar_type() != x.scalar_type() && !is_autocast(x)) return std::nullopt;
  const bool is_hashed = compares_bytes_ && !read.fingerprint && weight.is_cpu() &&
                         !weight.key_set().has(c10::DispatchKey::Python) && weight.is_contiguous();
  const bool is_shown = is_hashed || read.fingerprint;
  const bool columnwise = read.columnwise && at::GradMode::is_enabled();
  const Key key = key_of(read);
  const Gradient gradient = is_shown ? std::nullopt : gradient_of(read);
  std::shared_ptr<const Codes> codes;
  bool is_second = false, is_same_use = false, has_codes = false;
  {
    const std::lock_guard lock(mutex_);
    codes = std::move(codes_);
    has_codes = is_second = is_second_use(read, key, is_shown, gradient);
    is_same_use = is_second && is_reused_;
    if (read.saves_weight && columnwise) {
      if (!form_ || form_->first != key.state) form_ = {key.state, is_second};
      has_codes = form_->second;
    }
    if (is_same_use && has_codes) codes_ = codes;
  }
  if (!has_codes) return std::nullopt;
  if (!is_second) return cast_weight(read, true, true);
  std::optional<std::uint64_t> hash;
  if (is_hashed) hash = fingerprint_of(weight);
  const bool is_current = is_same_use && codes && codes->use.key == key && codes->hash == hash;
  if (is_current && (codes->has_columnwise || !columnwise)) return codes->tensors;
  std::vector<Tensor> tensors = cast_weight(read, !is_current, columnwise);
  if (is_current) std::copy_n(codes->tensors.begin(), tensors.size() / 2, tensors.begin());
  const Use use = {key, read.matrix.storage().getWeakStorageImpl()};
  codes = std::make_shared<const Codes>(Codes{use, hash, std::move(tensors), columnwise});
  std::shared_ptr<const Codes> freed;
  const std::lock_guard lock(mutex_);
  freed = std::exchange(codes_, codes);
  return codes->tensors;
}

}  // namespace torch_ops

TORCH_LIBRARY_FRAGMENT(minifloat, m) {
  using torch::arg;
  using torch_ops::Tensor;
  using torch_ops::WeightCodes;
  using Self = c10::intrusive_ptr<WeightCodes>;
  m.class_<WeightCodes>("WeightCodes")
      .def(torch::init(&WeightCodes::make))
      .def("id", &WeightCodes::id)
      .def("operands",
           [](const Self& self, const Tensor& weight, const Tensor& matrix, const Tensor& x,
              const std::string& recipe, bool columnwise, bool training, bool saves_weight,
              const std::optional<Tensor>& amax_history, const std::optional<Tensor>& main_grad,
              std::optional<std::int64_t> fingerprint, const std::string& group, std::int64_t rank,
              std::int64_t ranks, std::int64_t weight_dim) {
             bridge::check_memory_if_real("WeightCodes", "weight", weight);
             bridge::check_memory_if_real("WeightCodes", "matrix", matrix);
             bridge::check_memory_if_real("WeightCodes", "x", x);
             if (amax_history)
               bridge::check_memory_if_real("WeightCodes", "amax_history", *amax_history);
             return self->operands({.weight = weight,
                                    .matrix = matrix,
                                    .x = x,
                                    .recipe = recipe,
                                    .columnwise = columnwise,
                                    .training = training,
                                    .saves_weight = saves_weight,
                                    .amax_history = amax_history,
                                    .main_grad = main_grad,
                                    .fingerprint = fingerprint,
                                    .sharding = {group, rank, ranks, weight_dim, std::nullopt}});
           },
           "",
           {arg("weight"), arg("matrix"), arg("x"), arg("recipe"), arg("columnwise"),
            arg("training"), arg("saves_weight"), arg("amax_history"), arg("main_grad"),
            arg("fingerprint"), arg("group") = "", arg("rank") = 0, arg("ranks") = 1,
            arg("weight_dim") = 0})
      .def("forget", &WeightCodes::forget)
      .def("start_over", &WeightCodes::start_over)
      .def("capture", &WeightCodes::capture)
      .def("held", &WeightCodes::held);
  m.def("count_step", [] { ++torch_ops::steps_taken; });  // of any torch optimizer
}

}  // namespace minifloat

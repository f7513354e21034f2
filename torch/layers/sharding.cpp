#include "layers/sharding.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace minifloat::torch_ops {
namespace {

constexpr std::int64_t kMostRanks = 1 << 14;

c10::OperatorHandle find_collective(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// Begins a collective. Arguments are boxed, because torch 2.14 and 2.15 have other types for the
// texts of the reduction and of the group.
Tensor begin_collective(const c10::OperatorHandle& op, c10::Stack arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(arguments);
  return arguments[0].toTensor();
}

Tensor begin_all_reduce(const std::string& group, const char* of, const Tensor& t) {
  static const auto op = find_collective("_c10d_functional::all_reduce");
  return begin_collective(op, {t, of, group});
}

Tensor as_bytes(const Tensor& t) {
  return t.contiguous().view_symint({t.sym_numel()}).view(at::kByte);
}

// Returns (ranks, …), with tokens along dimension `dim` of the rest, as the whole operand: run
// after run, and within a run rank after rank.
Tensor join(const Tensor& shards, std::int64_t dim, const TokenRuns& runs) {
  c10::SymDimVector shape(shards.sym_sizes().begin(), shards.sym_sizes().end());
  const SymInt tokens = shape[1 + dim];
  shape[1 + dim] = runs.count;
  shape.insert(shape.begin() + 2 + dim, tokens / runs.count);
  return shards.reshape_symint(shape).movedim(0, 1 + dim).flatten(dim, dim + 2).contiguous();
}

}  // namespace

void check_sharding(const char* op, const Sharding& s, const Tensor& x) {
  TORCH_CHECK_VALUE(1 <= s.ranks && s.ranks <= kMostRanks && 0 <= s.rank && s.rank < s.ranks, op,
                    ": expected a rank from 0 to ranks - 1, of at most ", kMostRanks,
                    " ranks, got rank ", s.rank, " of ", s.ranks);
  TORCH_CHECK_VALUE(s.weight_dim == 0 || s.weight_dim == 1, op,
                    ": expected weight_dim = 0 (N) or 1 (K), got ", s.weight_dim);
  TORCH_CHECK_VALUE(
      !s.token_dim || (s.weight_dim == 0 && 0 <= *s.token_dim && *s.token_dim < x.dim() - 1), op,
      ": expected token_dim as a dimension of tokens of x ", x.sym_sizes(),
      ", of a weight that is cut along N, got ", *s.token_dim);
  TORCH_CHECK_VALUE(!s.sums_dx || (s.weight_dim == 0 && !s.token_dim), op,
                    ": expected sum_dx with a weight that is cut along N and a whole x, got "
                    "weight_dim = ",
                    s.weight_dim, s.token_dim ? " and a token_dim" : "");
}

TokenRuns token_runs(const Sharding& sharding, c10::SymIntArrayRef x_shape) {
  TokenRuns runs{1, 1};
  const std::size_t cut = sharding.token_dim ? static_cast<std::size_t>(*sharding.token_dim) : 0;
  for (std::size_t i = 0; i + 1 < x_shape.size(); ++i) {
    SymInt& part = i < cut ? runs.count : runs.length;
    part = part * x_shape[i];
  }
  return runs;
}

Tensor largest_of_ranks(const Sharding& sharding, const Tensor& amax) {
  // Bits of magnitudes have the order of the values. The mask makes a new tensor: Inductor (torch
  // 2.11) reduces no view.
  constexpr std::int64_t kMagnitude = 0x7fffffff;
  const Tensor own = amax.view(at::kInt).bitwise_and(kMagnitude);
  if (sharding.ranks == 1) return own.view(at::kFloat);
  return wait_for(begin_all_reduce(sharding.group, "max", own)).view(at::kFloat);
}

Tensor sum_of_ranks(const std::string& group, const Tensor& t) {
  return wait_for(begin_sum(group, t));
}

Tensor begin_sum(const std::string& group, const Tensor& t) {
  return begin_all_reduce(group, "sum", t);
}

Tensor wait_for(const Tensor& begun) {
  static const auto wait = find_collective("_c10d_functional::wait_tensor");
  const at::AutoDispatchBelowADInplaceOrView below;
  c10::Stack arguments{begun};
  wait.callBoxed(arguments);
  return arguments[0].toTensor();
}

TokenGather::TokenGather(const Sharding& s, const TokenRuns& runs, const QuantizedOperand& operand,
                         bool columnwise)
    : ranks_(s.ranks), runs_(runs), operand_(operand), dim_(columnwise ? 1 : 0) {
  if (ranks_ == 1) return;
  operand_.decoded = Tensor();
  std::vector<Tensor> bytes;
  for (const Tensor* t : cut()) bytes.push_back(as_bytes(*t));
  if (bytes.empty()) return;
  // One collective for all tensors.
  static const auto op = find_collective("_c10d_functional::all_gather_into_tensor");
  const Tensor sent = bytes.size() == 1 ? bytes[0] : at::cat(bytes);
  begun_ = begin_collective(op, {sent, ranks_, s.group});
}

std::vector<Tensor*> TokenGather::cut() {
  std::vector<Tensor*> found;
  for (Tensor* t : {&operand_.codes, &operand_.scale, &operand_.amax})
    if (t->defined() && t->dim() > dim_ && t->sym_numel() != 0) found.push_back(t);
  return found;
}

QuantizedOperand TokenGather::finish() {
  if (!begun_.defined()) return operand_;
  const std::vector<Tensor*> parts_of = cut();
  std::vector<SymInt> lengths;
  for (const Tensor* t : parts_of) lengths.push_back(as_bytes(*t).sym_numel());
  const Tensor received = wait_for(begun_);
  const std::vector<Tensor> parts = received.view_symint({ranks_, received.sym_numel() / ranks_})
                                        .split_with_sizes_symint(lengths, 1);
  for (std::size_t i = 0; i < parts_of.size(); ++i) {
    Tensor& t = *parts_of[i];
    c10::SymDimVector shape(t.sym_sizes().begin(), t.sym_sizes().end());
    shape.insert(shape.begin(), ranks_);
    const Tensor flat = parts[i].contiguous().view_symint({ranks_ * lengths[i]});
    t = join(flat.view(t.scalar_type()).view_symint(shape), dim_, runs_);
  }
  begun_ = Tensor();
  return operand_;
}

Tensor begin_scatter_sum(const Sharding& s, const TokenRuns& runs, const Tensor& dx) {
  if (s.ranks == 1) return dx;
  static const auto op = find_collective("_c10d_functional::reduce_scatter_tensor");
  const SymInt k = dx.sym_size(1);
  const Tensor by_rank =
      dx.view_symint({runs.count, s.ranks, runs.length, k}).transpose(0, 1).contiguous();
  return begin_collective(op, {by_rank.view_symint({dx.sym_size(0), k}), "sum", s.ranks, s.group});
}

GatheredInput::GatheredInput(std::int64_t readers) : readers_(readers) {
  TORCH_CHECK_VALUE(readers > 0, "GatheredInput: expected at least one reader, got ", readers);
}

void GatheredInput::begin(const Sharding& sharding, const TokenRuns& runs,
                          const QuantizedOperand& shard, bool columnwise) {
  const std::lock_guard lock(mutex_);
  if (left_ > 0) return;
  gather_.emplace(sharding, runs, shard, columnwise);
  left_ = readers_;
}

QuantizedOperand GatheredInput::get() {
  const std::lock_guard lock(mutex_);
  const QuantizedOperand out = gather_->finish();
  if (--left_ == 0) gather_.reset();
  return out;
}

void register_gathered_input() {
  static const auto registered =
      torch::class_<GatheredInput>("minifloat", "GatheredInput").def(torch::init<std::int64_t>());
  static_cast<void>(registered);
}

}  // namespace minifloat::torch_ops

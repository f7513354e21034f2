#include "layers/layer_state.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include "layers/double_backward.h"
#include "ops/bridge.h"

namespace minifloat::torch_ops {
namespace {

constexpr const char* kRng =
    ": expected rng as forward read it, got a tensor that was modified by an inplace operation "
    "since; backward draws from it too";
constexpr const char* kHistory =
    ": expected amax_history as forward read it, got a tensor that was modified by an inplace "
    "operation since; backward scales by it too. Call mf.step after the backward passes of all "
    "forwards";
constexpr const char* kWeightOperands =
    ": expected weight_operands as forward read them, got a tensor that was modified by an inplace "
    "operation since; backward reads them too";

// Of the tensors of torch.func.vmap, and of those of is_grads_batched.
constexpr c10::DispatchKeySet kBatchedKeys({c10::DispatchKey::FuncTorchBatched,
                                            c10::DispatchKey::Batched});

// Returns whether a tensor's memory is freed, as FSDP2 does until it gathers a weight's codes.
bool is_freed(const Tensor& t) {
  return t.defined() && bridge::is_real(t) && t.numel() > 0 && t.storage().nbytes() == 0;
}

std::uint32_t version_of(const Tensor& t) { return t.is_inference() ? 0 : t._version(); }

}  // namespace

void LayerState::add(at::TensorList tensors, const char* error) {
  for (const Tensor& t : tensors)
    if (t.defined()) reads_.push_back({t, version_of(t), error});
}

void LayerState::add_rng(at::TensorList states) { add(states, kRng); }
void LayerState::add_histories(at::TensorList histories) { add(histories, kHistory); }
void LayerState::add_weight_operands(at::TensorList operands) { add(operands, kWeightOperands); }

void LayerState::keep_freed(std::vector<Tensor>& saved) {
  if (at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return;
  for (std::size_t first = 0; first < saved.size(); ++first) {
    if (!is_freed(saved[first])) continue;
    for (std::size_t i = first; i < first + 3; ++i) {  // codes, scale and amax: ForwardPass::save
      Tensor& t = saved[i];
      if (!t.defined() || t.numel() == 0) continue;
      add_weight_operands(t);
      const Tensor in_place = at::empty({}, t.options()).expand(t.sizes());
      freed_.emplace_back(i, std::exchange(t, in_place));
    }
  }
}

std::vector<Tensor> LayerState::saved_tensors(torch::autograd::AutogradContext& context,
                                              const std::vector<Tensor>& grads) const {
  for (const Tensor& g : grads)
    TORCH_CHECK_NOT_IMPLEMENTED(
        !g.defined() || !g.key_set().has_any(kBatchedKeys), op_,
        ": expected the gradients of one backward pass, got a batch of them, as is_grads_batched, "
        "jacobian(vectorize=True) and vmap pass. Call torch.autograd.grad for each, or use "
        "torch.func.vjp, jacrev and vmap of the function itself");
  // May run a checkpointed forward pass again, which records its own graph.
  std::vector<Tensor> saved = context.get_saved_variables();
  for (const auto& [i, codes] : freed_) saved[i] = codes;
  for (const Read& read : reads_)
    TORCH_CHECK(version_of(read.tensor) == read.version, op_, read.error);
  for (const Tensor& t : saved)
    if (t.defined() && t.scalar_type() == at::kInt)
      bridge::check_memory_if_real(op_, "saved indices", t);
  return saved;
}

namespace {

constexpr const char* kState = "state";

struct LayerFunction : torch::autograd::Function<LayerFunction> {
  using Context = torch::autograd::AutogradContext;
  using List = torch::autograd::variable_list;

  static List forward(Context* ctx, at::TensorList, c10::function_ref<ForwardResult()> run) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ForwardResult result = run();
    result.state->keep_freed(result.saved);
    ctx->save_for_backward(std::move(result.saved));
    ctx->saved_data[kState] = c10::IValue::make_capsule(std::move(result.state));
    return std::move(result.outputs);
  }

  static List backward(Context* ctx, List grads) {
    const auto holder = ctx->saved_data[kState].toCapsule();
    const auto& state = static_cast<const LayerState&>(*holder);
    const List saved = state.saved_tensors(*ctx, grads);
    List out;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      out = state.gradients(saved, grads);
    }
    out.emplace_back();  // of the function that forward ran
    if (!at::GradMode::is_enabled()) return out;
    const auto node = torch::autograd::get_current_node();
    return refuse_double_backward(state.op(), state.recipe().text, *node, grads, std::move(out));
  }
};

}  // namespace
}  // namespace minifloat::torch_ops

// Compiled autograd, which traces the backward pass of an eager layer, cannot make its state, which
// is no tensor, an input of the compiled code.
template <>
void torch::autograd::CppNode<minifloat::torch_ops::LayerFunction>::compiled_args(
    torch::dynamo::autograd::CompiledNodeArgs&) const {
  using minifloat::torch_ops::LayerState;
  const auto holder = ctx_.saved_data.at(minifloat::torch_ops::kState).toCapsule();
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, static_cast<const LayerState&>(*holder).op(),
      ": expected a compiled forward under compiled autograd, got an eager one, whose backward "
      "pass "
      "cannot be traced. Compile the model or its blocks too, or turn compiled autograd off");
}

namespace minifloat::torch_ops {

c10::SmallVector<Tensor, 8> joined(std::initializer_list<at::TensorList> lists) {
  c10::SmallVector<Tensor, 8> out;
  for (const at::TensorList list : lists) out.append(list.begin(), list.end());
  return out;
}

std::vector<Tensor> differentiate(at::TensorList inputs,
                                  c10::function_ref<ForwardResult()> forward) {
  return LayerFunction::apply(inputs, forward);
}

}  // namespace minifloat::torch_ops

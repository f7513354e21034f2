#include "layers/layer_call.h"

#include <ATen/ATen.h>

#include <type_traits>
#include <unordered_map>

namespace minifloat::torch_ops {
namespace {

using c10::IValue;
using Reader = void (*)(LayerCall&, const IValue&);

template <auto kMember>
using MemberType = std::remove_reference_t<decltype(std::declval<LayerCall&>().*kMember)>;

template <auto kMember>
void read(LayerCall& call, const IValue& value) {
  call.*kMember = value.to<MemberType<kMember>>();
}

// Reads a list, or the one element of an op with one weight.
template <auto kMember>
void read_each(LayerCall& call, const IValue& value) {
  using List = MemberType<kMember>;
  if (value.isList())
    call.*kMember = value.to<List>();
  else
    call.*kMember = {value.to<typename List::value_type>()};
}

// Reads one weight, which has no bias unless `bias` follows.
void read_weight(LayerCall& call, const IValue& value) {
  call.weights = {value.toTensor()};
  call.bias_index = {-1};
}

void read_bias(LayerCall& call, const IValue& value) {
  call.biases = {value.toTensor()};
  call.bias_index = {0};
}

void read_biases(LayerCall& call, const IValue& value) {
  for (const std::optional<Tensor>& bias : value.toOptionalTensorVector()) {
    call.bias_index.push_back(bias ? static_cast<int>(call.biases.size()) : -1);
    if (bias) call.biases.push_back(*bias);
  }
}

void read_cache(LayerCall& call, const IValue& value) {
  call.weight_cache = WeightCodes::find(value.toInt());
}

// Reads a member of the call's sharding.
template <auto kMember>
void read_sharding(LayerCall& call, const IValue& value) {
  if (!call.sharding) call.sharding.emplace();
  Sharding& sharding = *call.sharding;
  sharding.*kMember = value.to<std::remove_reference_t<decltype(sharding.*kMember)>>();
}

// The readers by the names of arguments. An argument that is None is not read.
const std::unordered_map<std::string, Reader>& readers() {
  static const std::unordered_map<std::string, Reader> table = {
      {"x", read<&LayerCall::x>},
      {"weight", read_weight},
      {"weights", read<&LayerCall::weights>},
      {"bias", read_bias},
      {"biases", read_biases},
      {"recipe", read<&LayerCall::recipe>},
      {"activation", read<&LayerCall::activation>},
      {"rng", read_each<&LayerCall::rng>},
      {"amax_history", read_each<&LayerCall::histories>},
      {"stream", read_each<&LayerCall::streams>},
      {"streams", read<&LayerCall::streams>},
      {"x_operands", read<&LayerCall::x_operands>},
      {"weight_operands", read<&LayerCall::weight_operands>},
      {"recompute", read<&LayerCall::recompute>},
      {"main_grad", read_each<&LayerCall::main_grads>},
      {"main_grads", read<&LayerCall::main_grads>},
      {"accumulate", read<&LayerCall::accumulate>},
      {"received", read<&LayerCall::received>},
      {"group", read_sharding<&Sharding::group>},
      {"rank", read_sharding<&Sharding::rank>},
      {"ranks", read_sharding<&Sharding::ranks>},
      {"weight_dim", read_sharding<&Sharding::weight_dim>},
      {"token_dim", read_sharding<&Sharding::token_dim>},
      {"sum_dx", read_sharding<&Sharding::sums_dx>},
      {"gathered", read<&LayerCall::gathered>},
      {"weight_cache", read_cache},
      {"training", read<&LayerCall::training>},
  };
  return table;
}

// Returns the readers of an op's arguments, in the schema's order: found by name once a thread.
const std::vector<Reader>& readers_of(const c10::FunctionSchema& schema) {
  thread_local std::unordered_map<const c10::FunctionSchema*, std::vector<Reader>> of_ops;
  if (const auto known = of_ops.find(&schema); known != of_ops.end()) return known->second;
  std::vector<Reader> found;
  for (const c10::Argument& argument : schema.arguments()) {
    const auto reader = readers().find(argument.name());
    TORCH_INTERNAL_ASSERT(reader != readers().end(), schema.name(), ": no reader of ",
                          argument.name());
    found.push_back(reader->second);
  }
  return of_ops.emplace(&schema, std::move(found)).first->second;  // whole, or not at all
}

}  // namespace

LayerCall::LayerCall(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  const std::vector<Reader>& readers = readers_of(schema);
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (!arguments[i].isNone()) readers[i](*this, arguments[i]);
}

std::vector<Tensor> cached_codes(const LayerCall& call) {
  if (!call.weight_cache || !call.weight_operands.empty()) return {};
  WeightRead read{.weight = call.weights[0],
                  .matrix = call.weights[0],
                  .x = call.x,
                  .recipe = call.recipe,
                  .columnwise = call.x.requires_grad(),
                  .training = call.training,
                  .saves_weight = !call.recompute.empty()};
  if (!call.histories.empty()) read.amax_history = call.histories[0];
  if (!call.main_grads.empty()) read.main_grad = call.main_grads[0];
  return call.weight_cache->operands(read).value_or(std::vector<Tensor>());
}

Layers layers_of(const char* op, const LayerCall& call, std::size_t begin, std::size_t count) {
  // Lists of a wrong length are passed on whole: check_layers counts them.
  const bool is_whole = count == call.weights.size();
  const auto part = [&](at::TensorList list, std::size_t of_each) {
    return list.empty() || is_whole ? list : list.slice(of_each * begin, of_each * count);
  };
  std::size_t first_bias = 0, biases = 0;
  PerLayer<int> bias_index;
  for (std::size_t i = 0; i < call.bias_index.size(); ++i) {
    const bool has_bias = call.bias_index[i] >= 0, is_before = !is_whole && i < begin;
    if (is_before) first_bias += has_bias;
    if (is_before || (!is_whole && i >= begin + count)) continue;
    bias_index.push_back(has_bias ? static_cast<int>(biases) : -1);
    biases += has_bias;
  }
  const at::IntArrayRef streams = call.streams;
  return {.weights = at::TensorList(call.weights).slice(begin, count),
          .biases = at::TensorList(call.biases).slice(first_bias, biases),
          .bias_index = std::move(bias_index),
          .rng = part(call.rng, 1),
          .histories = part(call.histories, 1),
          .streams = streams.empty() || is_whole ? streams : streams.slice(begin, count),
          .recomputes_weights = recomputes_weights(op, call.recompute),
          .prequantized = {begin == 0 ? at::TensorList(call.x_operands) : at::TensorList(),
                           part(call.weight_operands, 8)},
          .shards = {call.sharding ? &*call.sharding : nullptr, call.gathered},
          .sums = {accumulation(op, call.accumulate, call.received, !call.main_grads.empty()),
                   part(call.main_grads, 1)}};
}

}  // namespace minifloat::torch_ops

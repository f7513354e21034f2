// The ops that have kernels for a device: each is one object beside its code, which registers the
// kernels and calls the op through the dispatcher. schemas.cpp has the schemas.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <utility>

namespace minifloat::torch_ops {

// Raises NotImplementedError where t has a tangent. op, name: of the argument, for the message.
void check_no_tangent(const char* op, const char* name, const at::Tensor& t);

// The autograd kernels of ops without a derivative of their own.
torch::CppFunction skipped();             // of codes: autograd passes through
torch::CppFunction without_derivative();  // of codes: outputs require no grad, a tangent raises
torch::CppFunction refused();             // of values: a backward pass or a tangent raises

template <class Signature>
class Op;

template <class Result, class... Arguments>
class Op<Result(Arguments...)> {
 public:
  using Kernel = Result (*)(Arguments...);

  // kernel: for the CPU, CUDA and Meta. On Meta it makes all checks of the arguments, and returns
  // results that have shapes alone.
  Op(const char* name, Kernel kernel)
      : library_(torch::Library::IMPL, "minifloat", std::nullopt, __FILE__, __LINE__),
        handle_(registered(name, kernel).template typed<Result(Arguments...)>()) {}
  Op(const char* name, Kernel kernel, torch::CppFunction derivative) : Op(name, kernel) {
    library_.impl(name, c10::DispatchKey::Autograd, std::move(derivative));
  }

  Result operator()(Arguments... arguments) const {
    return handle_.call(std::forward<Arguments>(arguments)...);
  }

 private:
  c10::OperatorHandle registered(const char* name, Kernel kernel) {
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Meta})
      library_.impl(name, key, kernel);
    return *c10::Dispatcher::singleton().findOp(library_._resolve(name));
  }

  torch::Library library_;
  c10::TypedOperatorHandle<Result(Arguments...)> handle_;
};

template <class Result, class... Arguments, class... Rest>
Op(const char*, Result (*)(Arguments...), Rest...) -> Op<Result(Arguments...)>;

}  // namespace minifloat::torch_ops

// What autograd calls for a GradientReducer. A hook outlives its reducer without harm.
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "c10d/gradients/gradient_reducer.h"

namespace dreamcomm {

using torch::autograd::variable_list;

[[noreturn]] inline void refuse_compiled_autograd() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "dreamcomm reduces gradients in backward passes that autograd runs "
                              "itself, not in those of compiled autograd: leave "
                              "torch._dynamo.config.compiled_autograd off");
}

/// After autograd has added to a parameter's gradient.
class GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(std::weak_ptr<GradientReducer> reducer, std::size_t index)
      : reducer_(std::move(reducer)), index_(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    if (const auto reducer = reducer_.lock()) reducer->on_gradient(index_, inputs[0]);
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }
  std::shared_ptr<GradientReducer> reducer() const { return reducer_.lock(); }
  bool is_live() const { return !reducer_.expired(); }

 private:
  const std::weak_ptr<GradientReducer> reducer_;
  const std::size_t index_;
};

/// Before autograd adds to a parameter's gradient, which may have been reduced into a shard.
class ShardHook final : public torch::autograd::FunctionPreHook {
 public:
  ShardHook(std::weak_ptr<GradientReducer> reducer, std::size_t index)
      : reducer_(std::move(reducer)), index_(index) {}
  variable_list operator()(const variable_list& grads) override {
    if (const auto reducer = reducer_.lock()) reducer->before_gradient(index_);
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

 private:
  const std::weak_ptr<GradientReducer> reducer_;
  const std::size_t index_;
};

/// Before autograd goes through an output of the module.
class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit OutputHook(std::weak_ptr<GradientReducer> reducer) : reducer_(std::move(reducer)) {}
  variable_list operator()(const variable_list& grads) override {
    if (const auto reducer = reducer_.lock()) reducer->on_output();
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

 private:
  const std::weak_ptr<GradientReducer> reducer_;
};

}  // namespace dreamcomm

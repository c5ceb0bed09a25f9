#include "c10d/backward/hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <utility>

namespace dreamcomm {
namespace {

using torch::autograd::variable_list;
using CompiledArgs = torch::dynamo::autograd::CompiledNodeArgs;

[[noreturn]] void refuse_compiled_autograd() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "dreamcomm reduces gradients in backward passes that autograd runs "
                              "itself, not in those of compiled autograd: leave "
                              "torch._dynamo.config.compiled_autograd off");
}

/// After autograd has added to a parameter's gradient.
class GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(std::weak_ptr<BackwardPass> pass, std::size_t index)
      : pass_(std::move(pass)), index_(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    if (const auto pass = pass_.lock()) pass->on_gradient(index_, inputs[0]);
    return outputs;
  }
  void compiled_args(CompiledArgs&) const override { refuse_compiled_autograd(); }
  std::shared_ptr<BackwardPass> pass() const { return pass_.lock(); }

 private:
  const std::weak_ptr<BackwardPass> pass_;
  const std::size_t index_;
};

/// Before autograd adds to a parameter's gradient, which may have been reduced into a shard.
class ShardHook final : public torch::autograd::FunctionPreHook {
 public:
  ShardHook(std::weak_ptr<BackwardPass> pass, std::size_t index)
      : pass_(std::move(pass)), index_(index) {}
  variable_list operator()(const variable_list& grads) override {
    if (const auto pass = pass_.lock()) pass->before_gradient(index_);
    return grads;
  }
  void compiled_args(CompiledArgs&) const override { refuse_compiled_autograd(); }
  bool is_of(const BackwardPass& pass) const { return pass_.lock().get() == &pass; }

 private:
  const std::weak_ptr<BackwardPass> pass_;
  const std::size_t index_;
};

/// Before autograd goes through an output of the module.
class OutputHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit OutputHook(std::weak_ptr<BackwardPass> pass) : pass_(std::move(pass)) {}
  variable_list operator()(const variable_list& grads) override {
    if (const auto pass = pass_.lock()) pass->on_output();
    return grads;
  }
  void compiled_args(CompiledArgs&) const override { refuse_compiled_autograd(); }

 private:
  const std::weak_ptr<BackwardPass> pass_;
};

void require_alone(const Parameter& parameter) {
  for (const auto& hook : parameter.accumulator->post_hooks()) {
    const auto* const other = dynamic_cast<const GradientHook*>(hook.get());
    const bool is_torchs = dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook.get());
    TORCH_CHECK_VALUE(!is_torchs && (other == nullptr || !other->pass()), "parameter '",
                      parameter.name, "' is already reduced by another wrapper",
                      is_torchs ? ", torch's DistributedDataParallel" : "",
                      ": wrap each module once, and delete the first wrapper before a second one");
  }
}

}  // namespace

PassHooks::PassHooks(std::shared_ptr<BackwardPass> pass) : pass_(std::move(pass)) {
  BucketSet& set = pass_->set();
  const BucketSet::Lock lock(set.mutex);
  for (Parameter& one : set.parameters) {
    one.accumulator = torch::autograd::impl::grad_accumulator(one.tensor);
    require_alone(one);
  }
  for (std::size_t i = 0; i < set.parameters.size(); ++i) {
    Parameter& one = set.parameters[i];
    after_.push_back(one.accumulator->add_post_hook(std::make_unique<GradientHook>(pass_, i)));
    one.accumulator->add_pre_hook(std::make_unique<ShardHook>(pass_, i));
    one.mark_planned();
  }
}

void PassHooks::detach() {
  BucketSet& set = pass_->set();
  const BucketSet::Lock lock(set.mutex);
  for (std::size_t i = 0; i < after_.size(); ++i) {
    auto& accumulator = set.parameters[i].accumulator;
    accumulator->del_post_hook(after_[i]);
    std::erase_if(accumulator->pre_hooks(), [this](const auto& hook) {
      const auto* const before = dynamic_cast<const ShardHook*>(hook.get());
      return before != nullptr && before->is_of(*pass_);
    });
    accumulator = nullptr;
  }
  after_.clear();
}

void PassHooks::await_backward(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || !output.grad_fn()) continue;
    output.grad_fn()->add_pre_hook(std::make_unique<OutputHook>(pass_));
  }
}

std::shared_ptr<BackwardPass> PassHooks::pass_of(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return nullptr;
  for (const auto& hook : accumulator->post_hooks()) {
    const auto* const ours = dynamic_cast<const GradientHook*>(hook.get());
    if (ours == nullptr) continue;
    if (std::shared_ptr<BackwardPass> pass = ours->pass()) return pass;
  }
  return nullptr;
}

}  // namespace dreamcomm

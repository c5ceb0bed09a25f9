// The hooks that autograd calls in backward passes, for a BackwardPass.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "c10d/backward/pass.h"

namespace dreamcomm {

/// The hooks on the parameters of a pass: from construction on, until detach(). A hook outlives its
/// pass without harm.
class PassHooks {
 public:
  /// Throws if another pass, or torch's DistributedDataParallel, has any of the parameters.
  explicit PassHooks(std::shared_ptr<BackwardPass> pass);
  ~PassHooks() { detach(); }
  PassHooks(const PassHooks&) = delete;
  PassHooks& operator=(const PassHooks&) = delete;

  void detach();
  /// A pass through these outputs begins when it reaches one of them.
  void await_backward(const std::vector<at::Tensor>& outputs);
  /// The pass whose hooks are on the parameter, or null.
  static std::shared_ptr<BackwardPass> pass_of(const at::Tensor& parameter);

 private:
  const std::shared_ptr<BackwardPass> pass_;
  std::vector<std::uintptr_t> after_;  // autograd has added to a gradient
};

}  // namespace dreamcomm

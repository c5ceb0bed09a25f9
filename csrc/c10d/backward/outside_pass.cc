// Reductions that no run of autograd makes: by request, and of a rank without data.
#include <ATen/core/grad_mode.h>

#include <cstddef>
#include <set>
#include <vector>

#include "c10d/backward/pass.h"

namespace dreamcomm {

void BackwardPass::reduce_now() {
  const Lock lock(set_->mutex);
  drop_dead_pass();
  TORCH_CHECK(state_ == State::kIdle, set_->who,
              ": reduce_gradients() was called while a backward pass of the same "
              "module is under way; call it after backward()");
  set_->touch_rest();
  set_apart_large();
  next_ = 0;
  settle([this] { launch_rest(); }, /*of_zeros=*/false);
  set_->holds_all = set_->rule.is_sharded();
}

/// Gradients that are given by hand may be one memory, which would be reduced once for each.
void BackwardPass::set_apart_large() {
  const at::NoGradGuard no_grad;
  std::set<const void*> taken;
  for (Parameter& one : set_->parameters) {
    const at::Tensor& now = one.tensor.grad();
    if (!set_->rule.is_large(one.gradient_bytes()) || !now.defined() || !now.has_storage())
      continue;
    if (taken.insert(now.const_data_ptr()).second) continue;
    one.grad() = now.clone();
    set_apart_ += now.nbytes();
  }
}

void BackwardPass::reduce_zeros() {
  const Lock lock(set_->mutex);
  settle(
      [this] {
        std::vector<Bucket>& buckets = set_->buckets;
        for (std::size_t i = 0; i < buckets.size(); ++i) {
          buckets[i].launch(set_->parameters, set_->rule, i, buckets.size(), /*zeros=*/true);
          if (set_->rule.hook_in_turn) buckets[i].await_hook();
        }
      },
      /*of_zeros=*/true);
  order_.begin();
  if (!order_.is_learned()) order_.learn(*set_);
}

}  // namespace dreamcomm

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
  set_->begin_counts();
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

void BackwardPass::begin_shards() {
  const Lock lock(set_->mutex);
  recover();
  if (set_->counting) set_->counting->forget();
  set_->shard_sums->begin_step(set_->parameters, set_->who, !set_->rule.is_sharded());
}

void BackwardPass::begin_shard() {
  const Lock lock(set_->mutex);
  set_->shard_sums->begin_shard();
}

void BackwardPass::end_shard() {
  const Lock lock(set_->mutex);
  TORCH_CHECK(state_ == State::kIdle, set_->who,
              ": a shard ends while its backward pass is under way");
  ShardSums& sums = *set_->shard_sums;
  const bool is_last = sums.is_last();
  sums.end_shard(set_->parameters, set_->who);
  // The step reduces them.
  if (is_last && set_->rule.row.is_deferred()) sums.fold_all(set_->parameters);
}

void BackwardPass::leave_shards() {
  const Lock lock(set_->mutex);
  recover();
  if (set_->counting && set_->shard_sums->missing() > 0) set_->counting->forget_all();
  set_->shard_sums->leave(set_->parameters);
}

std::size_t BackwardPass::missing_shards() const {
  const Lock lock(set_->mutex);
  return set_->shard_sums ? set_->shard_sums->missing() : 0;
}

void BackwardPass::reduce_zeros() {
  const Lock lock(set_->mutex);
  set_->begin_counts(RankCount::of_whole(0));
  settle(
      [this] {
        set_->await_counts();
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

#include "c10d/buckets/sharded_gradients.h"

#include <algorithm>
#include <utility>

namespace dreamcomm {

ShardedGradients::ShardedGradients(std::shared_ptr<BucketSet> set, const StageRow& row,
                                   const std::vector<at::ScalarType>& sum_types,
                                   const std::vector<std::optional<at::Tensor>>& stand_ins,
                                   const c10::intrusive_ptr<DreamBackend>& heaps)
    : set_(std::move(set)) {
  const BucketSet::Lock lock(set_->mutex);
  Parameters& parameters = set_->parameters;
  TORCH_CHECK_VALUE(sum_types.size() == parameters.size() && stand_ins.size() == parameters.size(),
                    set_->who, ": expected types and stand-ins of ", parameters.size(),
                    " gradients, got ", sum_types.size(), " and ", stand_ins.size());
  TORCH_CHECK_VALUE(set_->pass.expired(), set_->who,
                    ": gradients cannot be sharded within a backward pass");
  TORCH_CHECK_VALUE(!set_->rule.hook, set_->who,
                    ": a communication hook reduces these gradients already; a sharded optimizer "
                    "reduces them itself: leave the hook out");
  for (const Parameter& one : parameters) {
    TORCH_CHECK_VALUE(!one.is_sparse(), set_->who, ": parameter '", one.name,
                      "' has sparse gradients, which cannot be sharded: leave sparse=True out");
  }
  set_->rule.row = row;
  set_->rule.heaps = heaps;
  set_->holds_all = false;
  ++set_->changes;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].is_stand_in()) parameters[i].grad() = at::Tensor();
    parameters[i].shard = GradientShard();
    parameters[i].shard.sum_type = sum_types[i];
    parameters[i].shard.apart = row.parameter == TensorPlacement::kSharded;
    parameters[i].shard.stand_in = stand_ins[i].value_or(at::Tensor());
    parameters[i].mark_planned();  // the optimizer may have put rows together
  }
  set_->lay_out_in_heaps();
}

void ShardedGradients::end() {
  const BucketSet::Lock lock(set_->mutex);
  if (!set_->rule.is_sharded()) return;
  set_->rule.row = kDataParallel;
  set_->rule.heaps = nullptr;
  set_->holds_all = false;
  ++set_->changes;
  for (Parameter& one : set_->parameters) {
    if (one.is_stand_in()) one.grad() = at::Tensor();
    one.shard = GradientShard();
    one.touched = one.tensor.grad().defined();
  }
}

void ShardedGradients::hold(const std::vector<bool>& flags) {
  const BucketSet::Lock lock(set_->mutex);
  Parameters& parameters = set_->parameters;
  TORCH_CHECK_VALUE(flags.size() == parameters.size(), set_->who, ": expected flags of ",
                    parameters.size(), " gradients, got ", flags.size());
  for (std::size_t i = 0; i < flags.size(); ++i) {
    GradientShard& shard = parameters[i].shard;
    TORCH_CHECK_VALUE(shard.apart, set_->who, ": expected sharded parameters to hold gradients of");
    if (!flags[i]) shard.content = GradientShard::Content::kNothing;
  }
}

bool ShardedGradients::hold_gradients() const {
  const BucketSet::Lock lock(set_->mutex);
  return std::any_of(set_->parameters.begin(), set_->parameters.end(), [](const Parameter& one) {
    const bool is_there = one.shard.apart ? one.shard.is_held() : one.is_stand_in();
    return is_there && one.shard.gradient.defined() && !is_zero(one.shard.gradient);
  });
}

std::vector<at::Tensor> ShardedGradients::reduced() const {
  const BucketSet::Lock lock(set_->mutex);
  std::vector<at::Tensor> found;
  for (const Parameter& one : set_->parameters) {
    const bool is_there =
        set_->rule.row.is_deferred()
            ? set_->holds_all && one.shard.content != GradientShard::Content::kNothing
            : one.is_stand_in();
    found.push_back(is_there ? one.shard.gradient : at::Tensor());
  }
  return found;
}

at::Tensor ShardedGradients::memory(std::size_t index) const {
  const BucketSet::Lock lock(set_->mutex);
  return set_->parameters.at(index).shard.gradient;
}

std::optional<bool> ShardedGradients::agree(std::uint64_t digest) const {
  const BucketSet::Lock lock(set_->mutex);
  const bool is_deferred = set_->rule.row.is_deferred();
  const bool is_done =
      (set_->holds_all || !is_deferred) &&
      std::all_of(set_->parameters.begin(), set_->parameters.end(), [&](const Parameter& one) {
        return is_deferred ? one.is_unchanged() : !one.is_local();
      });
  // A bit and its complement are both set on some rank only where digests differ.
  constexpr std::size_t kBits = 64;
  std::vector<bool> flags{!is_done};
  for (std::size_t bit = 0; bit < kBits; ++bit) {
    const bool is_set = ((digest >> bit) & 1U) != 0;
    flags.push_back(is_set);
    flags.push_back(!is_set);
  }
  const std::vector<bool> any = set_on_any(set_->rule.group, set_->device(), flags);
  for (std::size_t bit = 0; bit < kBits; ++bit) {
    if (any[1 + 2 * bit] == any[2 + 2 * bit]) return std::nullopt;
  }
  return !any[0];
}

void ShardedGradients::note_seen() {
  const BucketSet::Lock lock(set_->mutex);
  for (Parameter& one : set_->parameters) {
    if (one.is_local()) one.seen.set(one.grad());
  }
}

std::vector<bool> ShardedGradients::changed() const {
  const BucketSet::Lock lock(set_->mutex);
  std::vector<bool> found;
  for (const Parameter& one : set_->parameters) {
    found.push_back(set_->rule.row.is_deferred() && one.is_local() && one.seen.is_set() &&
                    !one.seen.is_unchanged(one.grad()));
  }
  return found;
}

}  // namespace dreamcomm

// What a GradientReducer does for a sharded optimizer.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

#include "c10d/base/pages.h"
#include "c10d/gradients/gradient_checks.h"
#include "c10d/gradients/gradient_hooks.h"
#include "c10d/gradients/gradient_reducer.h"
#include "c10d/gradients/rank_exchange.h"
#include "c10d/gradients/sharded_step.h"
#include "c10d/process/process_heap.h"

namespace dreamcomm {

std::shared_ptr<GradientReducer> GradientReducer::of(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return nullptr;
  for (const auto& hook : accumulator->post_hooks()) {
    const auto* const ours = dynamic_cast<const GradientHook*>(hook.get());
    if (ours != nullptr && ours->is_live()) return ours->reducer();
  }
  return nullptr;
}

std::vector<at::Tensor> GradientReducer::parameters() const {
  const Lock lock(mutex_);
  std::vector<at::Tensor> found;
  for (const Gradient& gradient : gradients_) found.push_back(gradient.parameter);
  return found;
}

void GradientReducer::shard(std::vector<Shard> shards, bool deferred,
                            const c10::intrusive_ptr<DreamBackend>& heaps) {
  const Lock lock(mutex_);
  TORCH_CHECK_VALUE(shards.size() == gradients_.size(), who_, ": expected ", gradients_.size(),
                    " shards, got ", shards.size());
  TORCH_CHECK_VALUE(!active_, who_, ": gradients cannot be sharded within a backward pass");
  TORCH_CHECK_VALUE(!rule_.hook, who_,
                    ": a communication hook reduces these gradients already; a sharded optimizer "
                    "reduces them itself: leave the hook out");
  for (const Gradient& gradient : gradients_) {
    TORCH_CHECK_VALUE(!gradient.sparse, who_, ": parameter '", gradient.name,
                      "' has sparse gradients, which cannot be sharded: leave sparse=True out");
  }
  const bool hooked = rule_.sharded;
  rule_.sharded = true;
  rule_.deferred = deferred;
  rule_.heaps = heaps;
  if (!hooked) own_bytes_ = rule_.own_bytes;
  rule_.own_bytes = heaps ? own_bytes_ : 0;
  reduced_ = false;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (gradients_[i].is_stand_in()) gradients_[i].tensor() = at::Tensor();
    gradients_[i].shard = std::move(shards[i]);
    gradients_[i].shard.sharded = true;
    gradients_[i].mark_planned();  // the optimizer may have put rows together
    if (shard_hooked_ || !gradients_[i].accumulator) continue;
    gradients_[i].accumulator->add_pre_hook(std::make_unique<ShardHook>(weak_from_this(), i));
  }
  shard_hooked_ = true;
  lay_out_in_heaps();
}

void GradientReducer::unshard() {
  const Lock lock(mutex_);
  if (!rule_.sharded) return;
  rule_.sharded = rule_.deferred = reduced_ = false;
  rule_.heaps = nullptr;
  rule_.own_bytes = own_bytes_;
  if (early_births_) set_heap_births(nullptr);
  early_births_ = nullptr;
  for (Gradient& gradient : gradients_) {
    if (gradient.is_stand_in()) gradient.tensor() = at::Tensor();
    gradient.shard = Shard();
    gradient.touched = gradient.parameter.grad().defined();
  }
}

bool GradientReducer::holds_shards() const {
  const Lock lock(mutex_);
  return std::any_of(gradients_.begin(), gradients_.end(), [](const Gradient& one) {
    return one.is_stand_in() && one.shard.gradient.defined() && !is_zero(one.shard.gradient);
  });
}

void GradientReducer::trim() {
  if (early_sizes_.empty() || trimmed_) return;
  give_back_free_pages();
  trimmed_ = true;
}

/// Before any gradient is there: a small tensor that is made when a large gradient was freed takes
/// a piece of its memory, which the next large one does not fit into any more.
void GradientReducer::lay_out_in_heaps() {
  if (!rule_.heaps) return;
  for (GradientBucket& bucket : buckets_) bucket.lay_out(gradients_, rule_);
}

void GradientReducer::note_early(const Gradient& gradient) {
  const at::Tensor& now = gradient.parameter.grad();
  const std::size_t bytes = gradient.parameter.nbytes();
  if (!births_ || gradient.made != 1 || bytes < rule_.own_bytes || gradient.sparse) return;
  const std::shared_ptr<Heap> heap = live_process_heap();
  if (!heap || is_in_heap(now)) return;
  const auto same_size = [bytes](const Gradient& one) { return one.parameter.nbytes() == bytes; };
  int& wanted = early_sizes_[bytes];
  if (wanted >= 2 * std::count_if(gradients_.begin(), gradients_.end(), same_size)) return;
  ++wanted;
  early_births_ = std::make_shared<HeapBirths>(heap, early_sizes_);
}

/// Autograd must not add to a stand-in: a new gradient begins, whose average is added to the shard.
void GradientReducer::before_gradient(std::size_t index) {
  const Lock lock(mutex_);
  drop_dead_pass();
  Gradient& gradient = gradients_[index];
  if (!rule_.sharded) return;
  // Peers read the gradient while its bucket is under way.
  if (rule_.heaps && active_) buckets_[gradient.bucket].complete_sharded(gradients_, rule_);
  if (gradient.is_stand_in()) {
    gradient.tensor() = at::Tensor();
    gradient.shard.adds = true;
    return;
  }
  gradient.notice_cleared();
  if (!gradient.parameter.grad().defined() || !gradient.touched) {
    gradient.shard.adds = false;
  }
}

/// After a first pass: gradients that autograd has made again after their bucket was reduced.
void GradientReducer::reduce_rest() {
  const bool mine = std::any_of(gradients_.begin(), gradients_.end(),
                                [](const Gradient& one) { return one.made > 1; });
  if (!set_on_any(rule_.group, device(), {mine})[0]) return;
  for (Gradient& gradient : gradients_) gradient.touched = gradient.touched && gradient.is_local();
  next_ = 0;
  while (next_ < buckets_.size()) launch_next();
  settle_all(true);
}

std::vector<at::Tensor> GradientReducer::shard_gradients() const {
  const Lock lock(mutex_);
  std::vector<at::Tensor> found;
  found.reserve(gradients_.size());
  for (const Gradient& gradient : gradients_) {
    const bool is_there =
        rule_.deferred ? reduced_ && gradient.shard.valid : gradient.is_stand_in();
    found.push_back(is_there ? gradient.shard.gradient : at::Tensor());
  }
  return found;
}

at::Tensor GradientReducer::shard_memory(std::size_t index) const {
  const Lock lock(mutex_);
  return gradients_.at(index).shard.gradient;
}

GradientReducer::Agreed GradientReducer::agree_reduced(std::uint64_t digest) const {
  const Lock lock(mutex_);
  const auto is_done = [this](const Gradient& one) {
    return rule_.deferred ? one.is_unchanged() : !one.is_local();
  };
  const bool mine =
      (reduced_ || !rule_.deferred) && std::all_of(gradients_.begin(), gradients_.end(), is_done);
  // A bit and its complement are both set on some rank only where digests differ.
  constexpr std::size_t kBits = 64;
  std::vector<bool> flags{!mine};
  for (std::size_t bit = 0; bit < kBits; ++bit) {
    const bool is_set = ((digest >> bit) & 1U) != 0;
    flags.push_back(is_set);
    flags.push_back(!is_set);
  }
  const std::vector<bool> any = set_on_any(rule_.group, device(), flags);
  bool same = true;
  for (std::size_t bit = 0; bit < kBits; ++bit) same &= any[1 + 2 * bit] != any[2 + 2 * bit];
  return {!any[0], same};
}

void GradientReducer::set_optimizer_memory(const std::vector<std::optional<at::Tensor>>& masters,
                                           const std::vector<std::vector<at::Tensor>>& states) {
  const Lock lock(mutex_);
  TORCH_CHECK_VALUE(masters.size() == gradients_.size() && states.size() == gradients_.size(), who_,
                    ": expected one master and state for each of ", gradients_.size(),
                    " parameters");
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    Shard& shard = gradients_[i].shard;
    shard.master = masters[i].value_or(at::Tensor());
    TORCH_CHECK_VALUE(states[i].size() <= shard.state.size(), who_, ": too many states");
    shard.state = {};
    std::copy(states[i].begin(), states[i].end(), shard.state.begin());
  }
}

std::vector<bool> GradientReducer::step(const std::vector<OptimizerRule>& rules,
                                        const std::vector<int>& rule_of, bool reads) {
  const Lock lock(mutex_);
  drop_dead_pass();
  TORCH_CHECK(!active_, who_, ": step() was called within a backward pass; call it afterwards");
  TORCH_CHECK_VALUE(rule_.heaps, who_, ": the ranks do not map each other's heaps");
  std::vector<at::Tensor> placed(gradients_.size());
  if (reads) {
    touch_all();
    for (GradientBucket& bucket : buckets_) {
      const std::vector<at::Tensor> members = bucket.place(gradients_, rule_);
      for (std::size_t i = 0; i < members.size(); ++i) placed[bucket.members()[i]] = members[i];
    }
  }
  const auto pass = std::make_shared<ShardedStep>(rule_.group->getSize(), rule_.group->getRank(),
                                                  rules, reads, rule_.factor);
  std::vector<at::Tensor> used;
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].parameter.numel() == 0) continue;
    pass->add(gradients_[i], placed[i], rules.empty() ? 0 : rule_of.at(i));
    used.push_back(gradients_[i].parameter);
    if (placed[i].defined()) used.push_back(placed[i]);
    numbers.push_back(i);
  }
  rule_.heaps->sharded_pass(pass, used, /*async=*/false)->wait();
  trim();
  std::vector<bool> touched(gradients_.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    touched[numbers[i]] = pass->touched()[i];
    if (touched[numbers[i]]) gradients_[numbers[i]].parameter.unsafeGetTensorImpl()->bump_version();
  }
  return touched;
}

void GradientReducer::note_seen() {
  const Lock lock(mutex_);
  for (Gradient& gradient : gradients_) {
    if (gradient.is_local()) gradient.mark_seen();
  }
}

std::vector<bool> GradientReducer::changed() const {
  const Lock lock(mutex_);
  std::vector<bool> found;
  for (const Gradient& gradient : gradients_) {
    found.push_back(rule_.deferred && gradient.is_local() && gradient.was_seen() &&
                    !gradient.is_as_seen());
  }
  return found;
}

}  // namespace dreamcomm

#include "c10d/gradients/gradient_reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "c10d/gradients/gradient_checks.h"
#include "c10d/gradients/gradient_hooks.h"
#include "c10d/gradients/rank_exchange.h"
#include "c10d/process/process_heap.h"
#include "core/error.h"

namespace dreamcomm {
namespace {

using std::chrono::steady_clock;

std::string named(const c10d::ProcessGroup& group) {
  return concat("rank ", group.getRank(), " of ", group.getSize());
}

double seconds_since(steady_clock::time_point begin) {
  return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

}  // namespace

GradientReducer::GradientReducer(Gradients gradients, BucketRule rule, Replan replan, Mixed mixed)
    : gradients_(std::move(gradients)),
      rule_(std::move(rule)),
      replan_(std::move(replan)),
      mixed_(std::move(mixed)),
      who_(named(*rule_.group)) {}

GradientReducer::~GradientReducer() { detach(); }

void GradientReducer::attach() {
  const Lock lock(mutex_);
  for (Gradient& gradient : gradients_) {
    gradient.accumulator = torch::autograd::impl::grad_accumulator(gradient.parameter);
    for (const auto& hook : gradient.accumulator->post_hooks()) {
      const auto* other = dynamic_cast<const GradientHook*>(hook.get());
      const bool torchs = dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook.get());
      TORCH_CHECK_VALUE(
          !torchs && (other == nullptr || !other->is_live()), "parameter '", gradient.name,
          "' is already reduced by another wrapper",
          torchs ? ", torch's DistributedDataParallel" : "",
          ": wrap each module once, and delete the first wrapper before a second one");
    }
  }
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    gradients_[i].hook = gradients_[i].accumulator->add_post_hook(
        std::make_unique<GradientHook>(weak_from_this(), i));
    gradients_[i].mark_planned();
  }
}

void GradientReducer::detach() {
  const Lock lock(mutex_);
  if (early_births_) set_heap_births(nullptr);
  early_births_ = nullptr;
  for (Gradient& gradient : gradients_) {
    if (gradient.accumulator) gradient.accumulator->del_post_hook(gradient.hook);
    gradient.accumulator = nullptr;
  }
}

void GradientReducer::set_buckets(const Buckets& buckets) {
  const Lock lock(mutex_);
  buckets_.clear();
  buckets_.reserve(buckets.size());
  for (const std::vector<std::size_t>& members : buckets) {
    for (const std::size_t member : members) gradients_[member].bucket = buckets_.size();
    buckets_.emplace_back(members, gradients_);
  }
  births_ = births();
  lay_out_in_heaps();
}

/// For each gradient that is reduced where it is.
std::shared_ptr<HeapBirths> GradientReducer::births() const {
  if (rule_.own_bytes == 0 || rule_.hook) return nullptr;
  std::map<std::size_t, int> wanted;
  for (const Gradient& gradient : gradients_) {
    const std::size_t bytes = gradient.parameter.nbytes();
    if (!gradient.sparse && bytes >= rule_.own_bytes) ++wanted[bytes];
  }
  std::shared_ptr<Heap> heap = live_process_heap();
  if (wanted.empty() || !heap) return nullptr;
  // Other tensors of a pass may have the size of a gradient.
  for (auto& [bytes, count] : wanted) count = 2 * count + 2;
  return std::make_shared<HeapBirths>(std::move(heap), wanted);
}

void GradientReducer::set_hook(std::shared_ptr<c10d::CommHookInterface> hook, bool in_turn) {
  const Lock lock(mutex_);
  rule_.hook = std::move(hook);
  rule_.hook_in_turn = in_turn;
  births_ = births();
}

void GradientReducer::set_static_graph(bool is_static) {
  const Lock lock(mutex_);
  static_ = is_static;
}

void GradientReducer::set_sync(bool sync) {
  const Lock lock(mutex_);
  sync_ = sync;
}

bool GradientReducer::sync() const {
  const Lock lock(mutex_);
  return sync_;
}

void GradientReducer::set_divisor(std::int64_t ranks) {
  const Lock lock(mutex_);
  rule_.divisor = ranks;
}

void GradientReducer::set_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, bool averages,
                                std::size_t own_bytes) {
  const Lock lock(mutex_);
  rule_.group = group;
  who_ = named(*group);
  rule_.averages = averages;
  rule_.own_bytes = own_bytes;
  births_ = births();
  learned_ = counted_ = false;
}

void GradientReducer::relearn() {
  const Lock lock(mutex_);
  learned_ = counted_ = false;
  static_touched_.clear();
  static_mine_.clear();
}

PassReport GradientReducer::report() const {
  const Lock lock(mutex_);
  return report_;
}

void GradientReducer::await_backward(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || !output.grad_fn()) continue;
    output.grad_fn()->add_pre_hook(std::make_unique<OutputHook>(weak_from_this()));
  }
}

void GradientReducer::set_unchecked(Unchecked unchecked) {
  const Lock lock(mutex_);
  unchecked_ = std::move(unchecked);
}

bool GradientReducer::check_planned() {
  const Lock lock(mutex_);
  is_checked_ = true;
  return std::all_of(gradients_.begin(), gradients_.end(),
                     [](const Gradient& one) { return !one.accumulator || one.is_as_planned(); });
}

void GradientReducer::recover() {
  const Lock lock(mutex_);
  if (!active_) return;
  for (GradientBucket& bucket : buckets_) bucket.drop();
  set_heap_births(nullptr);
  active_ = false;
}

/// Autograd drops what it was to call at a pass's end when an error ends the pass.
void GradientReducer::drop_dead_pass() {
  if (active_ && alive_.expired()) recover();
}

void GradientReducer::on_output() {
  const Lock lock(mutex_);
  drop_dead_pass();
  if (!active_ && makes_gradients()) begin();
}

/// Whether this run of autograd adds to any of the gradients. torch.autograd.grad, and a backward
/// pass to given inputs, may not; then other ranks need not run one.
bool GradientReducer::makes_gradients() const {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  return std::any_of(gradients_.begin(), gradients_.end(), [chosen](const Gradient& gradient) {
    const auto found = chosen->find(gradient.accumulator.get());
    return found != chosen->end() && found->second.needed_;
  });
}

void GradientReducer::begin() {
  active_ = true;
  synced_ = sync_ && !rule_.deferred;
  reduced_ = false;
  next_ = 0;
  began_ = steady_clock::now();
  order_.clear();
  mixes_ = false;
  set_apart_ = 0;
  for (GradientBucket& bucket : buckets_) bucket.pending = bucket.members().size();
  for (Gradient& gradient : gradients_) {
    gradient.mark_begun();
    // What was added up may have been cleared since.
    if (!rule_.sharded && !gradient.parameter.grad().defined()) gradient.touched = false;
    gradient.stale = must_be_fresh() && gradient.is_reduced() && !is_zero(gradient.tensor());
  }
  set_heap_births(births_);
  const auto alive = std::make_shared<char>();
  alive_ = alive;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), alive] {
    if (const auto self = weak.lock()) self->finish();
  });
  if (!std::exchange(is_checked_, false) && synced_ && unchecked_) unchecked_();
}

void GradientReducer::on_gradient(std::size_t index, const at::Tensor& arrived) {
  const Lock lock(mutex_);
  drop_dead_pass();
  Gradient& gradient = gradients_[index];
  if (!active_) {
    begin();
    gradient.forget_before();  // autograd may have made it already
  }
  if (gradient.stale && gradient.is_reduced()) {
    require_average(who_, gradient, rule_.factor);
    gradient.mixed = mixes_ = true;
  }
  require_layout(who_, gradient);
  if (gradient.parameter.grad().defined()) gradient.touched = true;
  gradient.made += 1;
  if (synced_) require_unstepped(who_, gradient, arrived);
  const std::size_t copied = gradient.set_apart(arrived);
  if (rule_.own_bytes > 0 && copied >= rule_.own_bytes) set_apart_ += copied;
  if (rule_.sharded) note_early(gradient);
  if (rule_.sharded) gradient.mark_seen();
  if (!synced_) return;
  if (gradient.made == 1) order_.push_back(static_cast<std::int64_t>(index));
  if (reduces_first_pass()) {
    if (gradient.made > 1) return;  // what comes later is reduced at the end
  } else {
    if (!learned_ || !counted_ || gradient.expected == 0) return;
    require_once(who_, gradient);
    if (gradient.made != gradient.expected) return;
  }
  buckets_[gradient.bucket].pending -= 1;
  launch_ready();
}

void GradientReducer::launch_ready() {
  while (next_ < buckets_.size() && buckets_[next_].pending == 0) {
    if (rule_.hook_in_turn && next_ > 0 && !buckets_[next_ - 1].hook_ended()) return;
    launch_next();
  }
}

void GradientReducer::launch_next() {
  if (rule_.hook_in_turn && next_ > 0) buckets_[next_ - 1].await_hook();
  // So gradients of two buckets are there at most.
  if (rule_.sharded && next_ > 0) buckets_[next_ - 1].complete_sharded(gradients_, rule_);
  buckets_[next_].launch(gradients_, rule_, next_, buckets_.size());
  ++next_;
}

/// At the end of a backward pass, on its thread.
void GradientReducer::finish() {
  const Lock lock(mutex_);
  set_heap_births(early_births_);
  if (!active_) return;
  active_ = false;
  if (!synced_) {
    tell_mixed();
    return;
  }
  report_.backward_seconds = seconds_since(began_);
  require_unstepped_all();
  while (next_ < buckets_.size()) launch_next();
  settle_all(true);
  if (rule_.heaps && !learned_) reduce_rest();  // on all ranks, also without gradients here
  if (!learned_) learn();
  if (!counted_ && !order_.empty()) {
    for (Gradient& gradient : gradients_) gradient.expected = gradient.made;
    counted_ = true;
    trim();
  }
}

/// Without `keep` this rank drops the results.
void GradientReducer::settle_all(bool keep) {
  const steady_clock::time_point begin = steady_clock::now();
  try {
    for (const GradientBucket& bucket : buckets_) bucket.await_hook();
    std::vector<bool> touched = exchange_touched(/*of_zeros=*/!keep);
    if (!keep) touched.assign(touched.size(), false);
    report_.bytes = 0;
    report_.copied = std::exchange(set_apart_, 0);
    for (GradientBucket& bucket : buckets_) {
      bucket.settle(gradients_, rule_, touched);
      report_.bytes += bucket.bytes();
      report_.copied += bucket.copied();
    }
  } catch (...) {
    for (GradientBucket& bucket : buckets_) bucket.drop();
    throw;
  }
  report_.exposed_seconds = seconds_since(begin);
  ++report_.passes;
}

/// Which gradients any rank has touched. A static graph's are those of its first pass.
std::vector<bool> GradientReducer::exchange_touched(bool of_zeros) {
  if (rule_.heaps) return std::vector<bool>(gradients_.size(), true);  // each bucket's pass tells
  std::vector<bool> mine(gradients_.size());
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = !of_zeros && gradients_[i].touched;
  if (!static_ && !rule_.finds_unused) {
    for (std::size_t i = 0; i < mine.size(); ++i)
      require_used(who_, gradients_[i], of_zeros || mine[i]);
    return std::vector<bool>(mine.size(), true);
  }
  if (!static_) return set_on_any(rule_.group, device(), mine);
  if (static_touched_.empty()) static_touched_ = set_on_any(rule_.group, device(), mine);
  if (of_zeros) return static_touched_;
  if (static_mine_.empty()) static_mine_ = mine;
  for (std::size_t i = 0; i < mine.size(); ++i)
    require_static(who_, gradients_[i], mine[i], static_mine_[i]);
  return static_touched_;
}

/// An optimizer may have stepped parameters whose gradients this pass does not make.
void GradientReducer::require_unstepped_all() {
  try {
    for (const Gradient& gradient : gradients_) require_unstepped(who_, gradient, {});
  } catch (...) {
    for (GradientBucket& bucket : buckets_) bucket.drop();
    throw;
  }
}

/// After the first pass that reduced: buckets in the order in which backward makes gradients.
void GradientReducer::learn() {
  const auto orders = orders_of_all(rule_.group, device(), order_, gradients_.size());
  // A pass may make none, such as one through an output that no parameter has a part in.
  if (std::all_of(orders.begin(), orders.end(), [](const auto& one) { return one.empty(); }))
    return;
  set_buckets(replan_(orders));
  learned_ = true;
}

void GradientReducer::tell_mixed() {
  if (std::exchange(mixes_, false) && mixed_) mixed_();
}

std::vector<at::Tensor> GradientReducer::mixed() const {
  const Lock lock(mutex_);
  std::vector<at::Tensor> found;
  for (const Gradient& gradient : gradients_) {
    if (!gradient.mixed || !gradient.is_reduced() || is_zero(gradient.tensor())) continue;
    found.push_back(gradient.parameter);
  }
  return found;
}

void GradientReducer::reduce_now() {
  const Lock lock(mutex_);
  drop_dead_pass();
  TORCH_CHECK(!active_, who_,
              ": reduce_gradients() was called while a backward pass of the same "
              "module is under way; call it after backward()");
  touch_all();
  set_apart_large();
  next_ = 0;
  while (next_ < buckets_.size()) launch_next();
  settle_all(true);
  reduced_ = rule_.sharded;
}

/// Before a reduction outside of a pass: all gradients take part that are not reduced.
void GradientReducer::touch_all() {
  for (Gradient& gradient : gradients_) {
    if (rule_.sharded) {
      const bool old = !rule_.deferred && gradient.is_as_reduced();
      gradient.touched = gradient.is_local() && !old;
      if (gradient.touched) require_layout(who_, gradient);
      continue;
    }
    // What was written to a gradient after its reduction is as right in the average of all.
    const bool old = rule_.factor == 0 ? gradient.is_as_reduced() : gradient.is_reduced();
    const bool given = gradient.parameter.grad().defined() && !old;
    gradient.touched = (gradient.touched && gradient.parameter.grad().defined()) || given;
    gradient.mark_before();  // outside of a pass the script has made it what it is
    require_layout(who_, gradient);
  }
}

/// Gradients that are given by hand may be one memory, which would be reduced once for each.
void GradientReducer::set_apart_large() {
  const at::NoGradGuard no_grad;
  std::set<const void*> taken;
  for (Gradient& gradient : gradients_) {
    const at::Tensor& now = gradient.parameter.grad();
    const bool is_large = rule_.own_bytes > 0 && gradient.parameter.nbytes() >= rule_.own_bytes;
    if (!is_large || !now.defined() || !now.has_storage()) continue;
    if (taken.insert(now.const_data_ptr()).second) continue;
    gradient.tensor() = now.clone();
    set_apart_ += now.nbytes();
  }
}

void GradientReducer::reduce_zeros() {
  const Lock lock(mutex_);
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    buckets_[i].launch(gradients_, rule_, i, buckets_.size(), /*zeros=*/true);
    if (rule_.hook_in_turn) buckets_[i].await_hook();
  }
  settle_all(false);
  order_.clear();
  if (!learned_) learn();
}

}  // namespace dreamcomm

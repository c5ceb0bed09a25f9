#include "c10d/backward/pass.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "c10d/backward/checks.h"
#include "c10d/backward/wanted_tensors.h"

namespace dreamcomm {
namespace {

using std::chrono::steady_clock;

double seconds_since(steady_clock::time_point begin) {
  return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

}  // namespace

BackwardPass::BackwardPass(std::shared_ptr<BucketSet> set, Callbacks callbacks)
    : set_(std::move(set)), callbacks_(std::move(callbacks)), order_(callbacks_.replan) {}

void BackwardPass::set_sync(bool sync) {
  const Lock lock(set_->mutex);
  sync_ = sync;
}

bool BackwardPass::sync() const {
  const Lock lock(set_->mutex);
  return sync_;
}

void BackwardPass::relearn() {
  const Lock lock(set_->mutex);
  order_.forget(*set_);
  used_.forget();
}

PassReport BackwardPass::report() const {
  const Lock lock(set_->mutex);
  return report_;
}

bool BackwardPass::check_planned() {
  const Lock lock(set_->mutex);
  is_checked_ = true;
  return std::all_of(set_->parameters.begin(), set_->parameters.end(),
                     [](const Parameter& one) { return one.is_as_planned(); });
}

void BackwardPass::recover() {
  const Lock lock(set_->mutex);
  if (!runs()) return;
  for (Bucket& bucket : set_->buckets) bucket.drop();
  place_new_tensors(nullptr);
  set_->pass.reset();
  state_ = State::kIdle;
}

/// Autograd drops what it was to call at a pass's end when an error ends the pass.
void BackwardPass::drop_dead_pass() {
  if (runs() && set_->pass.expired()) recover();
}

void BackwardPass::on_output() {
  TORCH_CHECK(torch::autograd::get_current_graph_task_id() >= 0, set_->who,
              ": a backward pass begins while autograd runs, in one of its hooks");
  const Lock lock(set_->mutex);
  drop_dead_pass();
  if (!runs() && makes_gradients()) begin();
}

/// True if this run of autograd adds to any of the gradients. torch.autograd.grad, and a backward
/// pass to given inputs, may not; then other ranks need not run one.
bool BackwardPass::makes_gradients() const {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  return std::any_of(set_->parameters.begin(), set_->parameters.end(), [chosen](const auto& one) {
    const auto found = chosen->find(one.accumulator.get());
    return found != chosen->end() && found->second.needed_;
  });
}

/// True if gradients of earlier passes are there. Zeros that autograd has made are.
bool is_uncleared(const Parameter& one, bool was_taken) {
  const bool is_shard = one.is_stand_in();
  const at::Tensor& now = is_shard ? one.shard.gradient : one.tensor.grad();
  if (!now.defined()) return false;
  const bool is_made = !is_shard && !was_taken && one.seen.is_unchanged(now);
  return is_made || !is_zero(now);
}

void BackwardPass::begin_counts(bool reduces) {
  if (!set_->counting) return;
  Counting& counting = *set_->counting;
  const bool uncleared =
      std::any_of(set_->parameters.begin(), set_->parameters.end(),
                  [&](const Parameter& one) { return is_uncleared(one, counting.is_taken()); });
  // Gradients of a step's earlier shards were put aside.
  counting.begin_pass(uncleared || (set_->shard_sums && set_->shard_sums->has_some()));
  if (reduces) set_->begin_counts();
}

void BackwardPass::begin() {
  if (set_->shard_sums) set_->shard_sums->begin_pass(set_->who);
  const bool reduces = sync_ && set_->rule.row.in_backward() != Move::kNothing;
  state_ = reduces ? State::kReducing : State::kAccumulating;
  set_->holds_all = false;
  next_ = 0;
  began_ = steady_clock::now();
  order_.begin();
  set_apart_ = 0;
  for (Bucket& bucket : set_->buckets) bucket.pending = bucket.members().size();
  for (Parameter& one : set_->parameters) {
    one.mark_begun();
    // The sum so far may have been cleared since.
    if (!set_->rule.is_sharded() && !one.tensor.grad().defined()) one.touched = false;
    if (!must_be_fresh(one)) continue;
    const bool is_reduced = one.is_reduced() && !is_zero(one.grad());
    one.mix = is_reduced ? std::max(one.mix, Parameter::Mix::kReduced) : Parameter::Mix::kNone;
  }
  placement_.begin(*set_);
  const auto alive = std::make_shared<char>();
  set_->pass = alive;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), alive] {
    if (const auto self = weak.lock()) self->finish();
  });
  if (!std::exchange(is_checked_, false) && reduces && callbacks_.unchecked) callbacks_.unchecked();
  begin_counts(reduces);
}

void BackwardPass::on_gradient(std::size_t index, const at::Tensor& arrived) {
  const Lock lock(set_->mutex);
  drop_dead_pass();
  Parameter& parameter = set_->parameters[index];
  if (!runs()) {
    begin();
    parameter.before.forget();  // autograd may have made it already
  }
  note(parameter, arrived);
  if (state_ != State::kReducing || !is_complete(index)) return;
  if (set_->shard_sums) set_->shard_sums->fold(set_->parameters, index);
  set_->buckets[parameter.bucket].pending -= 1;
  launch_ready();
}

void BackwardPass::note(Parameter& parameter, const at::Tensor& arrived) {
  if (parameter.mix != Parameter::Mix::kNone && must_be_fresh(parameter) &&
      parameter.is_reduced()) {
    require_average(set_->who, parameter, set_->rule.factor_or(parameter.factor));
    parameter.mix = Parameter::Mix::kMixed;
  }
  parameter.require_layout(set_->who, set_->rule.is_sharded());
  if (parameter.tensor.grad().defined()) parameter.touched = true;
  parameter.made += 1;
  if (state_ == State::kReducing) require_unstepped(set_->who, parameter, arrived);
  const std::size_t copied = parameter.set_apart(arrived);
  if (set_->rule.is_large(copied)) set_apart_ += copied;
  if (!set_->rule.is_sharded() && !set_->rule.counted) return;
  if (set_->rule.is_sharded()) placement_.note_early(*set_, parameter);
  parameter.seen.set(parameter.grad());
}

/// True if a gradient is ready to be reduced.
bool BackwardPass::is_complete(std::size_t index) {
  const Parameter& parameter = set_->parameters[index];
  if (parameter.made == 1) order_.note(index);
  // A first pass of sharded parameters, or into the ranks' heaps, reduces before its end all the
  // same: else it would hold all gradients, and a heap keeps its pages. Gradients that autograd
  // makes later are reduced at the end.
  if (reduces_early() && !order_.is_counted()) return parameter.made == 1;
  if (!order_.is_learned() || parameter.expected == 0) return false;
  require_once(set_->who, parameter);
  return parameter.made == parameter.expected;
}

/// Python is called without the lock, which another thread may hold that waits for the GIL.
void BackwardPass::tell_starting() {
  {
    const Lock lock(set_->mutex);
    drop_dead_pass();
    if (runs()) return;
  }
  callbacks_.starting();
}

/// Before autograd adds to a stand-in, which it must not: a new gradient begins, whose average is
/// added to the shard.
void BackwardPass::before_gradient(std::size_t index) {
  if (callbacks_.starting) tell_starting();
  const Lock lock(set_->mutex);
  drop_dead_pass();
  // Gradients of earlier passes can only be told apart before autograd adds to them.
  if (!runs() && (set_->counting || set_->shard_sums)) begin();
  if (!set_->rule.is_sharded()) return;
  Parameter& parameter = set_->parameters[index];
  // Peers read the gradient while its bucket is under way.
  if (set_->rule.heaps && runs())
    set_->buckets[parameter.bucket].complete_scatter(set_->parameters, set_->rule);
  if (parameter.is_stand_in()) {
    parameter.grad() = at::Tensor();
    parameter.shard.set_adds(true);
    return;
  }
  parameter.notice_cleared();
  if (!parameter.tensor.grad().defined() || !parameter.touched) parameter.shard.set_adds(false);
}

void BackwardPass::launch_ready() {
  std::vector<Bucket>& buckets = set_->buckets;
  while (next_ < buckets.size() && buckets[next_].pending == 0) {
    if (set_->rule.hook_in_turn && next_ > 0 && !buckets[next_ - 1].hook_ended()) return;
    launch_next();
  }
}

void BackwardPass::launch_next() {
  std::vector<Bucket>& buckets = set_->buckets;
  if (next_ == 0) set_->await_counts();
  if (set_->rule.hook_in_turn && next_ > 0) buckets[next_ - 1].await_hook();
  if (set_->rule.gathers()) {
    complete_ended();
  } else if (set_->rule.is_sharded() && next_ > 0) {
    // So gradients of two buckets are there at most.
    buckets[next_ - 1].complete_scatter(set_->parameters, set_->rule);
  }
  buckets[next_].launch(set_->parameters, set_->rule, next_, buckets.size());
  ++next_;
}

/// Frees what reductions have read that have ended.
void BackwardPass::complete_ended() {
  for (std::size_t i = 0; i < next_; ++i) {
    Bucket& bucket = set_->buckets[i];
    if (bucket.has_ended()) bucket.complete_scatter(set_->parameters, set_->rule);
  }
}

std::size_t BackwardPass::launched() const {
  const Lock lock(set_->mutex);
  return runs() ? next_ : 0;
}

void BackwardPass::await_launched(std::size_t count) {
  const Lock lock(set_->mutex);
  if (!runs()) return;
  for (std::size_t i = 0; i < std::min(count, next_); ++i)
    set_->buckets[i].complete_scatter(set_->parameters, set_->rule);
}

void BackwardPass::launch_rest() {
  while (next_ < set_->buckets.size()) launch_next();
}

/// At the end of a backward pass, on its thread.
void BackwardPass::finish() {
  const std::optional<bool> reduced = end_pass();
  if (reduced && callbacks_.finished) callbacks_.finished(*reduced);
}

/// Returns whether the pass has reduced; nothing if an error has ended it before.
std::optional<bool> BackwardPass::end_pass() {
  const Lock lock(set_->mutex);
  placement_.end();
  if (!runs()) return std::nullopt;
  set_->pass.reset();
  const bool reduces = std::exchange(state_, State::kIdle) == State::kReducing;
  if (set_->counting) {
    set_->counting->end_pass(
        std::any_of(set_->parameters.begin(), set_->parameters.end(),
                    [](const Parameter& one) { return one.tensor.grad().defined(); }));
  }
  if (!reduces && set_->shard_sums) ShardSums::note_passed(set_->parameters);
  if (!reduces) {
    const bool is_mixed =
        std::any_of(set_->parameters.begin(), set_->parameters.end(),
                    [](const Parameter& one) { return one.mix == Parameter::Mix::kMixed; });
    if (is_mixed && callbacks_.mixed) callbacks_.mixed();
    return false;
  }
  report_.backward_seconds = seconds_since(began_);
  settle(
      [this] {
        // An optimizer may have stepped parameters whose gradients this pass does not make.
        for (const Parameter& one : set_->parameters) require_unstepped(set_->who, one, {});
        if (set_->shard_sums) set_->shard_sums->fold_all(set_->parameters);
        launch_rest();
      },
      /*of_zeros=*/false);
  if (reduces_early() && !order_.is_learned()) reduce_rest();  // on all ranks, also without any
  if (!order_.is_learned()) order_.learn(*set_);
  if (order_.is_counted()) return true;
  order_.count(*set_);
  if (order_.is_counted()) placement_.trim();
  return true;
}

/// Launches, waits for all buckets, and gives out what they have. `of_zeros`: this rank drops the
/// results.
void BackwardPass::settle(const std::function<void()>& launches, bool of_zeros) {
  state_ = State::kSettling;
  try {
    launches();
    const steady_clock::time_point begin = steady_clock::now();
    settle_buckets(of_zeros);
    report_.exposed_seconds = seconds_since(begin);
  } catch (...) {
    for (Bucket& bucket : set_->buckets) bucket.drop();
    state_ = State::kIdle;
    throw;
  }
  state_ = State::kIdle;
  ++report_.passes;
}

/// Without counts of all ranks no rank may go on to the next exchange: all throw here, wherever
/// their buckets are.
void BackwardPass::await_counts() const {
  if (!set_->counting) return;
  set_->counting->await();
  for (const Bucket& bucket : set_->buckets) {
    if (bucket.await_calls()) return;
  }
}

void BackwardPass::settle_buckets(bool of_zeros) {
  for (const Bucket& bucket : set_->buckets) bucket.await_hook();
  await_counts();
  std::vector<bool> touched = used_.agree(*set_, of_zeros);
  if (of_zeros) touched.assign(touched.size(), false);
  report_.bytes = 0;
  report_.copied = std::exchange(set_apart_, 0);
  for (Bucket& bucket : set_->buckets) {
    bucket.settle(set_->parameters, set_->rule, touched);
    report_.bytes += bucket.bytes();
    report_.copied += bucket.copied();
  }
  if (set_->shard_sums) set_->shard_sums->give_back(set_->parameters);
}

/// After a first pass: gradients that autograd has made again after their bucket was reduced.
void BackwardPass::reduce_rest() {
  const bool mine = std::any_of(set_->parameters.begin(), set_->parameters.end(),
                                [](const Parameter& one) { return one.made > 1; });
  if (!set_on_any(set_->rule.group, set_->device(), {mine})[0]) return;
  for (Parameter& one : set_->parameters) one.touched = one.touched && one.is_local();
  next_ = 0;
  settle([this] { launch_rest(); }, /*of_zeros=*/false);
}

}  // namespace dreamcomm

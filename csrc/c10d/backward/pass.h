// Reduces the gradients of a module in backward passes: notes which are ready, starts each bucket's
// move when it is complete, and settles all at the pass's end.
//
//   idle --first gradient, or output--> accumulating or reducing --end--> settling --> idle
//
// INVARIANT: every rank starts the moves of a pass in the order of the buckets, and all of them,
// whatever gradients its own pass makes; then one exchange of which gradients were touched.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "c10d/backward/heap_placement.h"
#include "c10d/backward/order.h"
#include "c10d/backward/used.h"
#include "c10d/buckets/bucket_set.h"

namespace dreamcomm {

/// Times and bytes of the latest pass that reduced.
struct PassReport {
  std::uint64_t passes = 0;
  double backward_seconds = 0;  // from its first to its last gradient
  double exposed_seconds = 0;   // that it then waited for collectives
  std::uint64_t bytes = 0;
  std::uint64_t copied = 0;  // of those bytes, reduced in another place than autograd made them
};

class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  struct Callbacks {
    GradientOrder::Replan replan;
    /// Called after a pass that did not reduce, and added to gradients that were reduced already.
    std::function<void()> mixed;
    /// Called when a pass that reduces begins without a forward pass that has looked for changes
    /// of the parameters; throws if there are any.
    std::function<void()> unchecked;
    /// Called at the end of each pass that has succeeded. `reduced`: it has reduced.
    std::function<void(bool reduced)> finished;
    /// Called before a pass adds to its first gradient, where nothing has begun the pass before. It
    /// may do so, and leaves the hooks where they are.
    std::function<void()> starting = {};
  };

  BackwardPass(std::shared_ptr<BucketSet> set, Callbacks callbacks);

  BucketSet& set() { return *set_; }
  /// True if the next passes reduce.
  bool sync() const;
  void set_sync(bool sync);
  /// True if all parameters are what the buckets were planned for; else hooks and buckets have to
  /// be made anew. The next pass then does not call Callbacks::unchecked.
  bool check_planned();
  /// Forgets a pass that an error ended.
  void recover();
  /// Outside of a pass: reduces what has accumulated.
  void reduce_now();
  /// Shards of a step; see ShardSums.
  void begin_shards();
  void begin_shard();
  void end_shard();
  void leave_shards();
  /// How many shards of a step that has begun have not ended; 0 without shards.
  std::size_t missing_shards() const;
  /// A pass of zeros, for a rank without data.
  void reduce_zeros();
  /// Learns the order of gradients anew in the next pass.
  void relearn();
  PassReport report() const;
  /// How many buckets this pass has launched; 0: none runs.
  std::size_t launched() const;
  /// Waits for the first `count` buckets that this pass has launched, and frees what they have
  /// read. All ranks have launched them, so that they end whatever other ranks wait for.
  void await_launched(std::size_t count);

  // Called by hooks.
  /// Begins a pass if this run of autograd makes any of the gradients.
  void on_output();
  /// `arrived`: what autograd has made the gradient of.
  void on_gradient(std::size_t index, const at::Tensor& arrived);
  void before_gradient(std::size_t index);

 private:
  using Lock = BucketSet::Lock;
  enum class State : std::uint8_t { kIdle, kAccumulating, kReducing, kSettling };

  bool runs() const { return state_ == State::kAccumulating || state_ == State::kReducing; }
  bool makes_gradients() const;
  void drop_dead_pass();
  void tell_starting();
  void begin();
  void note(Parameter& parameter, const at::Tensor& arrived);
  bool is_complete(std::size_t index);
  void launch_ready();
  void launch_next();
  void launch_rest();
  void complete_ended();
  void finish();
  std::optional<bool> end_pass();
  void settle(const std::function<void()>& launches, bool of_zeros);
  void settle_buckets(bool of_zeros);
  void reduce_rest();
  void set_apart_large();
  /// True if a first pass reduces before its end.
  bool reduces_early() const {
    return (set_->rule.heaps || set_->rule.gathers()) && !set_->shard_sums;
  }
  void begin_counts(bool reduces);
  void await_counts() const;
  /// True if a pass may not add to what is reduced without notice.
  bool must_be_fresh(const Parameter& parameter) const {
    if (set_->rule.counted) return false;  // counting.h
    const bool is_average = set_->rule.factor_or(parameter.factor) == 0;
    return !set_->rule.is_sharded() && (!is_average || state_ != State::kReducing);
  }

  const std::shared_ptr<BucketSet> set_;
  const Callbacks callbacks_;
  State state_ = State::kIdle;
  bool sync_ = true;
  bool is_checked_ = false;
  GradientOrder order_;
  UsedGradients used_;
  HeapPlacement placement_;
  std::size_t next_ = 0;         // the bucket to start next
  std::uint64_t set_apart_ = 0;  // bytes of large gradients that this pass has copied
  std::chrono::steady_clock::time_point began_;
  PassReport report_;
};

}  // namespace dreamcomm

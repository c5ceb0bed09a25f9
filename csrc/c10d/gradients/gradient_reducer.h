// Reduces the gradients of a module in backward passes: notes which are ready, starts each bucket's
// collective when it is complete, and settles all at the pass's end.
//
// Invariant: every rank starts the collectives of a pass in the order of the buckets, and all of
// them, whatever gradients its own pass makes; then one exchange of which gradients were touched.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c10d/gradients/gradient_bucket.h"
#include "c10d/gradients/heap_births.h"
#include "kernels/optimizer/optimizer.h"

namespace dreamcomm {

/// Times and bytes of the latest pass that reduced.
struct PassReport {
  std::uint64_t passes = 0;
  double backward_seconds = 0;  // from its first to its last gradient
  double exposed_seconds = 0;   // that it then waited for collectives
  std::uint64_t bytes = 0;
  std::uint64_t copied = 0;  // of those bytes, reduced in another place than autograd made them
};

class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  using Buckets = std::vector<std::vector<std::size_t>>;
  /// Makes the buckets anew, of each rank's order of gradients in its first pass: for each rank the
  /// parameters' numbers, those that got none left out.
  using Replan = std::function<Buckets(const std::vector<std::vector<std::int64_t>>& orders)>;
  /// Called after a pass that did not reduce, and added to gradients that were reduced already.
  using Mixed = std::function<void()>;
  /// Called when a pass that reduces begins without a forward pass that has looked for changes of
  /// the parameters; throws if there are any.
  using Unchecked = std::function<void()>;

  GradientReducer(Gradients gradients, BucketRule rule, Replan replan, Mixed mixed);
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// Registers the hooks: once, after the constructor. Throws if another reducer has any of the
  /// parameters.
  void attach();
  /// Ends all hooks.
  void detach();
  /// Replaces the buckets; between passes.
  void set_buckets(const Buckets& buckets);
  /// `in_turn`: as BucketRule::hook_in_turn.
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook, bool in_turn);
  void set_static_graph(bool is_static);
  /// Whether the next passes reduce.
  void set_sync(bool sync);
  bool sync() const;
  /// In a join: the average is of so many ranks; 0: of all.
  void set_divisor(std::int64_t ranks);
  void set_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, bool averages,
                 std::size_t own_bytes);

  // Sharded gradients (sharded_reducer.cc).
  /// From now on each rank keeps its shards of the averages alone: one for each gradient.
  /// `deferred` and `heaps`: as in BucketRule.
  void shard(std::vector<Shard> shards, bool deferred,
             const c10::intrusive_ptr<DreamBackend>& heaps);
  /// The reducer whose hooks are on the parameter, or null.
  static std::shared_ptr<GradientReducer> of(const at::Tensor& parameter);
  /// The parameters, in the order of their numbers.
  std::vector<at::Tensor> parameters() const;
  /// This rank's elements of the reduced gradients; undefined: no rank has a gradient.
  std::vector<at::Tensor> shard_gradients() const;
  /// The same, whatever `grad` is by now; undefined: none was reduced yet.
  at::Tensor shard_memory(std::size_t index) const;
  struct Agreed {
    bool reduced;  // the shards hold all that has accumulated, on all ranks
    bool same;     // all ranks gave one digest
  };
  /// What all ranks agree on. Collective.
  Agreed agree_reduced(std::uint64_t digest) const;
  /// Ends the sharding; what the shards hold is lost.
  void unshard();
  /// Whether a gradient other than zero is in shards alone.
  bool holds_shards() const;
  /// What the optimizer keeps of each parameter.
  void set_optimizer_memory(const std::vector<std::optional<at::Tensor>>& masters,
                            const std::vector<std::vector<at::Tensor>>& states);
  /// One pass over the ranks' heaps: reduces if it `reads`, steps this rank's elements of
  /// each parameter by the rule of its number, and writes them into all ranks' parameters. Without
  /// rules it only writes. Collective. Returns which gradients any rank has.
  std::vector<bool> step(const std::vector<OptimizerRule>& rules, const std::vector<int>& rule_of,
                         bool reads);
  /// Takes gradients that stay local as they are now for what autograd has made.
  void note_seen();
  /// Which gradients were changed since autograd made them, where they stay local.
  std::vector<bool> changed() const;

  /// A pass through these outputs begins when it reaches one of them.
  void await_backward(const std::vector<at::Tensor>& outputs);
  /// Whether all parameters are what the buckets were planned for; else hooks and buckets have to
  /// be made anew. The next pass then does not call Unchecked.
  bool check_planned();
  void set_unchecked(Unchecked unchecked);
  /// Forgets a pass that an error ended.
  void recover();
  /// Outside of a pass: reduces what has accumulated.
  void reduce_now();
  /// A pass of zeros, for a rank without data.
  void reduce_zeros();
  /// Learns the order of gradients anew in the next pass.
  void relearn();
  PassReport report() const;
  /// The parameters whose gradients are reduced in part, and were not cleared since.
  std::vector<at::Tensor> mixed() const;

  // Called by hooks.
  void on_output();
  /// `arrived`: what autograd has made the gradient of.
  void on_gradient(std::size_t index, const at::Tensor& arrived);
  void before_gradient(std::size_t index);

 private:
  using Lock = std::unique_lock<std::recursive_mutex>;

  bool makes_gradients() const;
  void drop_dead_pass();
  void begin();
  void launch_ready();
  void launch_next();
  void finish();
  void settle_all(bool keep);
  std::vector<bool> exchange_touched(bool of_zeros);
  void learn();
  void touch_all();
  void set_apart_large();
  void require_unstepped_all();
  void reduce_rest();
  void tell_mixed();
  /// Whether a pass may not add to what is reduced without notice.
  bool must_be_fresh() const { return !rule_.sharded && (rule_.factor != 0 || !synced_); }
  /// Whether the pass is the first one and reduces before its end all the same: else it would hold
  /// all gradients, and a heap keeps its pages. A gradient that autograd makes several times is
  /// reduced in several parts then.
  bool reduces_first_pass() const { return rule_.heaps && !rule_.deferred && !counted_; }
  /// Notes a gradient that autograd made before the pass was known to have begun: the next one of
  /// its size is born in the heap at any time.
  void note_early(const Gradient& gradient);
  /// Once, after a first step's gradients that were born elsewhere are in the heap.
  void trim();
  void lay_out_in_heaps();
  std::shared_ptr<HeapBirths> births() const;
  c10::Device device() const { return gradients_.front().parameter.device(); }

  mutable std::recursive_mutex mutex_;  // a hook of Python may ask for the report
  Gradients gradients_;
  BucketRule rule_;
  const Replan replan_;
  const Mixed mixed_;
  Unchecked unchecked_;
  bool is_checked_ = false;
  std::string who_;  // "rank 1 of 2", for errors
  std::vector<GradientBucket> buckets_;
  std::shared_ptr<HeapBirths> births_;
  std::map<std::size_t, int> early_sizes_;
  bool trimmed_ = false;
  bool shard_hooked_ = false;
  std::size_t own_bytes_ = 0;                 // BucketRule::own_bytes without sharding
  std::shared_ptr<HeapBirths> early_births_;  // between passes

  bool reduced_ = false;  // shards hold what has accumulated
  bool sync_ = true;
  bool static_ = false;
  bool learned_ = false;              // the order of gradients
  bool counted_ = false;              // how often this rank makes each
  std::vector<bool> static_touched_;  // what a static graph touches on any rank
  std::vector<bool> static_mine_;     // and on this one
  bool active_ = false;               // a pass is under way
  std::weak_ptr<void> alive_;         // while autograd runs that pass
  bool synced_ = false;               // and reduces
  std::size_t next_ = 0;              // the bucket to start next
  std::vector<std::int64_t> order_;   // of the gradients that this pass has made
  std::uint64_t set_apart_ = 0;       // bytes of large gradients that this pass has copied so
  bool mixes_ = false;                // this pass adds to gradients that were reduced already
  std::chrono::steady_clock::time_point began_;
  PassReport report_;
};

}  // namespace dreamcomm

// The parameters whose gradients are reduced together, their buckets, and how these are reduced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c10d/buckets/bucket.h"
#include "c10d/buckets/counting.h"
#include "c10d/buckets/shard_sums.h"

namespace dreamcomm {

/// The state that backward passes, sharded gradients and optimizer passes share. Each locks `mutex`
/// for its calls.
struct BucketSet {
  using Lock = std::unique_lock<std::recursive_mutex>;

  BucketSet(Parameters parameters, Rule rule);

  /// Replaces the buckets; between passes. Each names its members' numbers.
  void set_buckets(const std::vector<std::vector<std::size_t>>& members);
  /// Factors of the gradients, as Rule::factor: one for each parameter; 0: the rule's. Between
  /// passes. A bucket's members have one factor.
  void set_factors(const std::vector<double>& factors);
  void set_group(const GroupPtr& group, bool averages, std::size_t own_bytes);
  /// `in_turn`: as Rule::hook_in_turn.
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook, bool in_turn);
  /// Makes the flat tensors, where ranks map each other's heaps: before any gradient is there. A
  /// small tensor that is made when a large gradient was freed takes a piece of its memory, which
  /// the next large one does not fit into any more.
  void lay_out_in_heaps();
  /// Before a reduction outside of a pass: all gradients take part that are not reduced.
  void touch_rest();
  /// From now on gradients are averaged over counts; before the first pass. `over`: they stay sums,
  /// for somebody who divides sums over this larger group, by divisor().
  void set_counted(const GroupPtr& over = nullptr);
  /// From now on a step's gradients are sums over so many shards, along a tree; before the first
  /// pass, and before set_counted(). `per_rank` of them are this rank's.
  void set_shards(int shards, std::size_t per_rank);
  /// Before the first call of a reduction: `own` counts of this rank; nothing: what it has counted.
  void begin_counts(std::optional<RankCount> own = std::nullopt);
  /// Before the first bucket: waits for the counts, unless the buckets' calls take them themselves.
  void await_counts();
  /// The sum of all ranks' counts, after a reduction that has exchanged them; 0 is infinite.
  double divisor() const;
  /// Goes on with what another set has counted.
  void adopt_counting(BucketSet& other);
  /// The parameters whose gradients are reduced in part, and were not cleared since.
  std::vector<at::Tensor> mixed() const;
  c10::Device device() const { return parameters.front().tensor.device(); }
  /// True if the buckets' calls divide by counts, and throw without one before they move data.
  bool calls_count() const;

  mutable std::recursive_mutex mutex;  // a hook of Python may ask for the report
  Parameters parameters;
  Rule rule;
  std::vector<Bucket> buckets;
  std::optional<Counting> counting;     // if gradients are averaged over counts
  GroupPtr counted_over;                // as in set_counted()
  bool finishes = true;                 // False: reductions leave sums, and counts, to a later one
  std::optional<ShardSums> shard_sums;  // if the rule has shards
  std::string who;                      // "rank 1 of 2", for errors
  std::weak_ptr<void> pass;             // while autograd runs a backward pass
  bool holds_all = false;               // shards hold all that has accumulated
  std::uint64_t changes = 0;            // how often buckets, group, hook or row were set
};

}  // namespace dreamcomm

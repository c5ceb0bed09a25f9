// The order in which backward passes make gradients, which buckets follow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "c10d/buckets/bucket_set.h"

namespace dreamcomm {

class GradientOrder {
 public:
  /// Makes the buckets anew, of each rank's order of gradients in its first pass: for each rank the
  /// parameters' numbers, those that got none left out.
  using Replan = std::function<std::vector<std::vector<std::size_t>>(
      const std::vector<std::vector<std::int64_t>>& orders)>;
  explicit GradientOrder(Replan replan) : replan_(std::move(replan)) {}

  /// When a pass begins.
  void begin() { made_.clear(); }
  /// At each gradient that a pass makes; the first one of a parameter counts.
  void note(std::size_t index) { made_.push_back(static_cast<std::int64_t>(index)); }
  /// True if buckets follow the ranks' order.
  bool is_learned() const { return learned_; }
  /// True if it is known how often this rank makes each gradient.
  bool is_counted() const { return counted_ > 0; }
  /// After the first pass that reduced: buckets in the order in which ranks make gradients. A pass
  /// that makes none on any rank teaches nothing. Collective.
  void learn(BucketSet& set);
  /// After a pass that reduced: how often autograd has made each gradient.
  void count(BucketSet& set);
  /// Learns anew in the next pass.
  void forget(BucketSet& set);

 private:
  const Replan replan_;
  bool learned_ = false;
  std::size_t counted_ = 0;         // gradients of the pass that was counted
  std::vector<std::int64_t> made_;  // by the pass, in order
};

}  // namespace dreamcomm

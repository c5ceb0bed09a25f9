// The pass of an optimizer's step over the ranks' heaps.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "c10d/gradients/gradient.h"
#include "core/sharded_pass.h"
#include "kernels/optimizer/optimizer.h"

namespace dreamcomm {

class ShardedStep final : public ShardedPass {
 public:
  /// `rules`: empty: parameters are written as they are. `reads`: gradients are averaged in the
  /// pass; else they are in the shards. `factor`: as BucketRule::factor.
  ShardedStep(int world, int rank, std::span<const OptimizerRule> rules, bool reads, double factor)
      : world_(world), rank_(rank), rules_(rules), reads_(reads), factor_(factor) {}
  /// Before the pass. `placed`: the gradient in this rank's heap, of a pass that reads.
  void add(const Gradient& gradient, const at::Tensor& placed, int rule);

  std::span<const ShardedPart> parts() const override { return parts_; }
  bool reads() const override { return reads_; }
  bool writes() const override { return true; }
  double factor() const override { return factor_; }
  void apply(std::size_t part, std::size_t begin, std::size_t count,
             const std::byte* average) override;
  void touch(std::size_t part) override { touched_[part] = true; }
  const std::vector<bool>& touched() const { return touched_; }

 private:
  struct Member {
    int rule;
    std::byte* master;          // null: the parameter is stepped itself
    const std::byte* gradient;  // of the shard
    std::array<std::byte*, 3> state;
  };
  const int world_;
  const int rank_;
  const std::span<const OptimizerRule> rules_;
  const bool reads_;
  const double factor_;
  std::vector<ShardedPart> parts_;
  std::vector<Member> members_;
  std::vector<bool> touched_;
};

}  // namespace dreamcomm

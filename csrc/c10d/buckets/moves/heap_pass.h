// Reduces gradients that lie in the ranks' heaps into each rank's shards.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "c10d/buckets/parameter.h"
#include "core/sharded_pass.h"

namespace dreamcomm {

/// A parameter in a pass. `placed`: this rank's gradient, in its heap, or undefined.
ShardedPart sharded_part(const Parameter& parameter, const at::Tensor& placed, int world, int rank);

class ReduceToShards final : public ShardedPass {
 public:
  /// `factor`: as Rule::factor.
  ReduceToShards(int world, int rank, double factor)
      : world_(world), rank_(rank), factor_(factor) {}
  /// Before the pass; makes the shard's memory.
  void add(Parameter& parameter, const at::Tensor& placed);
  /// Gives the parameter's shard its average, if any rank has a gradient; after the pass.
  void give(Parameter& parameter, std::size_t part) {
    at::Tensor average = std::move(averages_[part]);
    if (touched_[part]) parameter.shard.gradient = std::move(average);
  }

  std::span<const ShardedPart> parts() const override { return parts_; }
  bool reads() const override { return true; }
  bool writes() const override { return false; }
  double factor() const override { return factor_; }
  void apply(std::size_t part, std::size_t begin, std::size_t count,
             const std::byte* average) override;
  void touch(std::size_t part) override { touched_[part] = true; }
  /// Which gradients any rank has; after the pass.
  const std::vector<bool>& touched() const { return touched_; }

 private:
  struct Target {
    std::byte* memory;
    const std::byte* addend;  // its content, where the average is added to it; else null
  };
  const int world_;
  const int rank_;
  const double factor_;
  std::vector<ShardedPart> parts_;
  std::vector<Target> targets_;
  std::vector<at::Tensor> averages_;
  std::vector<bool> touched_;
};

}  // namespace dreamcomm

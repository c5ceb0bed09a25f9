// An optimizer's step of each rank's elements, in one pass over the ranks' heaps.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "c10d/buckets/bucket_set.h"
#include "kernels/optimizer/optimizer.h"

namespace dreamcomm {

class OptimizerPass {
 public:
  /// `masters`: copies of more bits, of each parameter or none. `states`: what the optimizer keeps.
  /// All are flat, and as large as this rank's elements.
  OptimizerPass(std::shared_ptr<BucketSet> set, std::vector<std::optional<at::Tensor>> masters,
                std::vector<std::vector<at::Tensor>> states);
  /// Steps this rank's elements of each parameter by the rule of its number, and writes them into
  /// all ranks' parameters. Without rules it only writes. `before`: kSumRows averages
  /// gradients in the pass; with kNothing they are in the shards. Collective. Returns which
  /// gradients any rank has.
  std::vector<bool> step(const std::vector<OptimizerRule>& rules, const std::vector<int>& rule_of,
                         Move before);

 private:
  std::vector<at::Tensor> place_gradients();

  const std::shared_ptr<BucketSet> set_;
  const std::vector<std::optional<at::Tensor>> masters_;
  const std::vector<std::vector<at::Tensor>> states_;
  std::size_t steps_ = 0;
};

}  // namespace dreamcomm

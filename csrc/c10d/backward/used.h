// Which gradients any rank has touched in a pass.
#pragma once

#include <vector>

#include "c10d/buckets/bucket_set.h"

namespace dreamcomm {

class UsedGradients {
 public:
  /// Tells the ranks after a pass that reduced. `of_zeros`: this rank has taken part without
  /// gradients. Collective.
  /// Throws where the rule says that each rank has all, or the same in each pass.
  std::vector<bool> agree(const BucketSet& set, bool of_zeros);
  void forget();

 private:
  std::vector<bool> agree_static(const BucketSet& set, const std::vector<bool>& mine,
                                 bool of_zeros);

  // The first pass of a static graph has shown them.
  std::vector<bool> any_;   // on any rank
  std::vector<bool> mine_;  // on this one
};

}  // namespace dreamcomm

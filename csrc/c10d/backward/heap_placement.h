// Gradients in the heap from their beginning. While a backward pass runs, new tensors of the sizes
// of gradients get memory of the process's heap, so that no copy stands between autograd and the
// collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "c10d/buckets/bucket_set.h"

namespace dreamcomm {

class WantedTensors;  // wanted_tensors.h

/// Which sizes a module's passes want in the heap.
class HeapPlacement {
 public:
  ~HeapPlacement();
  /// On the thread of a pass, from its begin to its end.
  void begin(const BucketSet& set);
  void end();
  /// Notes a gradient that autograd made before the pass was known to have begun: the next one of
  /// its size is placed at any time.
  void note_early(const BucketSet& set, const Parameter& parameter);
  /// Once, after a first step's gradients that were made elsewhere are in the heap.
  void trim();

 private:
  std::shared_ptr<WantedTensors> wanted_;
  std::uint64_t planned_for_ = 0;         // BucketSet::changes
  std::shared_ptr<WantedTensors> early_;  // between passes
  std::map<std::size_t, int> early_sizes_;
  bool trimmed_ = false;
};

}  // namespace dreamcomm

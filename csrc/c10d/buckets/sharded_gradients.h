// Gradients of which each rank keeps its rows alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "c10d/buckets/bucket_set.h"

namespace dreamcomm {

class ShardedGradients {
 public:
  /// From now on the set's gradients are reduced as `row` says. `sum_types` are those of the
  /// averages, `stand_ins` what `grad` becomes, or nothing: one for each parameter. `heaps`: as
  /// Rule::heaps.
  ShardedGradients(std::shared_ptr<BucketSet> set, const StageRow& row,
                   const std::vector<at::ScalarType>& sum_types,
                   const std::vector<std::optional<at::Tensor>>& stand_ins,
                   const c10::intrusive_ptr<DreamBackend>& heaps);

  /// This rank's elements of the reduced gradients; undefined: no rank has a gradient.
  std::vector<at::Tensor> reduced() const;
  /// The same, whatever `grad` is by now; undefined: none was reduced yet.
  at::Tensor memory(std::size_t index) const;
  /// True if the shards hold all that has accumulated, on all ranks; nothing where ranks gave
  /// different digests. Collective.
  std::optional<bool> agree(std::uint64_t digest) const;
  /// With sharded parameters, whether each average is still a gradient of the script; one flag for
  /// each parameter. False: the next reduction replaces it, in memory of its own if that of the
  /// average is still in use. True changes nothing.
  void hold(const std::vector<bool>& flags);
  /// True if a gradient other than zero is in shards alone.
  bool hold_gradients() const;
  /// Takes gradients that stay local as they are now for what autograd has made.
  void note_seen();
  /// Which gradients were changed since autograd made them, where they stay local.
  std::vector<bool> changed() const;
  /// Ends the sharding; what the shards hold is lost.
  void end();

 private:
  const std::shared_ptr<BucketSet> set_;
};

}  // namespace dreamcomm

// How the buckets of a module are reduced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/buckets/moves/group_calls.h"
#include "c10d/buckets/table.h"
#include "core/counts.h"

namespace dreamcomm {

/// How ranks know which gradients any of them has.
enum class Unused : std::uint8_t {
  kExchanged,  // they tell each other after each pass
  kStatic,     // those of the first pass
  kRefused,    // each has to have all
};

struct Rule {
  GroupPtr group;
  StageRow row = kDataParallel;
  Unused unused = Unused::kExchanged;
  /// Gradients of so many bytes and more are reduced where they are; 0: none is.
  std::size_t own_bytes = 0;
  /// True if the group averages itself: the sum of all ranks is divided once, and rounded once.
  bool averages = false;
  /// The gradient is `factor` times the ranks' sum; 0: their average.
  double factor = 0;
  /// In a join, how many ranks the average is of; 0: all.
  std::int64_t divisor = 0;
  /// True if gradients are averaged over what the ranks count, not over ranks.
  bool counted = false;
  std::shared_ptr<GradientCounts> counts;  // of the reduction under way
  /// Sums are those of so many shards, of all ranks, along a tree; 0: of ranks, in their order.
  int shards = 0;
  /// The backend whose ranks map each other's heaps, where rows go through them; else null.
  c10::intrusive_ptr<DreamBackend> heaps;
  std::shared_ptr<c10d::CommHookInterface> hook;
  /// True if the hook may call several collectives, one after the other. Then a bucket's hook
  /// starts after the one before has ended: else ranks would call them in different orders.
  bool hook_in_turn = false;

  bool is_sharded() const { return row.is_sharded(); }
  /// True if ranks gather parameters in backward passes, and gradients go by copies. A rank then
  /// must not wait within a pass for what another may not have launched: that one may wait for this
  /// rank, to gather.
  bool gathers() const { return row.parameter == TensorPlacement::kSharded && !heaps; }
  /// Rows that do not go through the heaps are copied in any case, except those of large gradients
  /// where parameters are sharded, too.
  bool is_large(std::size_t bytes) const {
    return own_bytes > 0 && bytes >= own_bytes && (heaps || !is_sharded() || gathers());
  }
  /// True if a gradient is reduced where it is, in the heap, and not in a flat tensor.
  bool is_own(std::size_t bytes) const { return is_large(bytes) && !hook; }
  /// True if sums are of ranks, in their order, and not divided by counts.
  bool is_plain() const { return !counted && shards == 0; }
  /// The factor of gradients that have `own`; 0: none, as where counts divide them.
  double factor_or(double own) const { return counted ? 0 : own != 0 ? own : factor; }
  // `own`: of the gradients that are reduced.
  bool takes_average(double own) const {
    return averages && (!is_plain() || (factor_or(own) == 0 && divisor == 0));
  }
  c10d::ReduceOp op(double own) const {
    if (!takes_average(own)) return c10d::ReduceOp::SUM;
    if (is_plain()) return c10d::ReduceOp::AVG;
    return average_by(averaging(own));
  }
  /// The divisor of a sum, where the group's calls do not divide: the same on all ranks.
  double sum_divisor(double own) const {
    if (counted) return counts->divisor();
    if (factor_or(own) != 0) return 1;
    if (shards > 0) return shards;
    return static_cast<double>(divisor > 0 ? divisor : group->getSize());
  }
  c10::intrusive_ptr<Averaging> averaging(double own) const {
    auto made = c10::make_intrusive<Averaging>();
    made->divisor = shards == 0 ? 0 : factor_or(own) == 0 ? shards : 1;
    if (counted) made->counts = counts;
    made->along_tree = shards > 0;
    return made;
  }
};

}  // namespace dreamcomm

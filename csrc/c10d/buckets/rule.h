// How the buckets of a module are reduced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "c10d/backend/backend.h"
#include "c10d/buckets/moves/group_calls.h"
#include "c10d/buckets/table.h"

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
  /// The factor of gradients that have `own`; 0: none.
  double factor_or(double own) const { return own != 0 ? own : factor; }
  // `own`: of the gradients that are reduced.
  bool takes_average(double own) const { return averages && factor_or(own) == 0 && divisor == 0; }
  c10d::ReduceOp op(double own) const {
    return takes_average(own) ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
  }
};

}  // namespace dreamcomm

// From a call to the body that serves it.
#pragma once

#include <cstdint>

#include "gpu/rows_all_to_all.h"
#include "gpu/rows_in_place.h"
#include "gpu/rows_ring.h"
#include "gpu/rows_staged.h"

namespace dreamcomm::gpu {

/// How a call is carried out; in CallCard::row, the same on all ranks. Rows on registered
/// memory begin with a turn in which the ranks learn whose tensors are registered; if
/// some are not, they go on with the row named last.
enum class RowId : std::uint8_t {
  kStaged,          // any tensors: all kinds; all_reduce in one shot
  kTwoShot,         // any tensors: all_reduce, reduce
  kRing,            // any tensors, not in rank order: all_reduce
  kOneShotInPlace,  // inputs, if no rank's is its output: all_reduce; else kStaged
  kPull,            // inputs: all_reduce; else kTwoShot
  kPush,            // inputs and outputs: all_reduce, reduce; else kPull or kTwoShot
  kInPlace,         // inputs: reduce_scatter, all_gather, broadcast; else kStaged
};

/// all_reduce and reduce on memory that may be registered.
template <typename F, Target T>
DREAMCOMM_DEVICE void reduce_in_place(Block<T>& block, RowId row) {
  if (!block.open()) return;
  const bool all_in = block.all_in();
  const bool all_reduce = block.task.card.kind == Kind::kAllReduce;
  if (row == RowId::kOneShotInPlace) {
    const bool may = all_in && !block.any_over_itself();
    return may ? rows::one_shot_in_place<F>(block) : rows::one_shot<F>(block);
  }
  if (row == RowId::kPush && all_in && block.all_out()) return rows::push<F>(block);
  return all_in && all_reduce ? rows::pull<F>(block) : rows::two_shot<F>(block);
}

/// Calls that reduce elements of the format F.
template <typename F, Target T>
DREAMCOMM_DEVICE void reduce_body(Block<T>& block) {
  const auto row = static_cast<RowId>(block.task.card.row);
  if (block.task.card.kind == Kind::kReduceScatter) {
    if (row != RowId::kInPlace) return rows::reduce_scatter<F>(block);
    if (!block.open()) return;
    return block.all_in() ? rows::reduce_scatter_in_place<F>(block)
                          : rows::reduce_scatter<F>(block);
  }
  switch (row) {
    case RowId::kStaged:
      return rows::one_shot<F>(block);
    case RowId::kTwoShot:
      return rows::two_shot<F>(block);
    case RowId::kRing:
      return rows::ring_all_reduce<F>(block);
    default:
      return reduce_in_place<F>(block, row);
  }
}

/// Calls that move bytes.
template <Target T>
DREAMCOMM_DEVICE void move_body(Block<T>& block) {
  const Kind kind = block.task.card.kind;
  if (kind == Kind::kAllToAll) return rows::all_to_all(block);
  if (static_cast<RowId>(block.task.card.row) == RowId::kInPlace) {
    if (!block.open()) return;
    const bool is_there =
        kind == Kind::kBroadcast ? block.ins.at[block.task.card.root] != nullptr : block.all_in();
    if (is_there) return rows::fetch(block);
  }
  switch (kind) {
    case Kind::kAllGather:
    case Kind::kGather:
      return rows::gather(block);
    case Kind::kBroadcast:
    case Kind::kScatter:
      return rows::from_root(block);
    default:
      return rows::barrier(block);
  }
}

}  // namespace dreamcomm::gpu

// Dispatches a call to the body that carries it out.
#pragma once

#include "gpu/collectives/algorithm_id.h"
#include "gpu/collectives/all_to_all.h"
#include "gpu/collectives/in_place.h"
#include "gpu/collectives/low_latency.h"
#include "gpu/collectives/ring.h"
#include "gpu/collectives/staged.h"

namespace dreamcomm::gpu {

/// True if a call is carried out by LL packets; equal on all blocks of all ranks.
constexpr bool uses_packets(const KernelArgs& args) {
  return static_cast<AlgorithmId>(args.info.row) == AlgorithmId::kFlagged && args.size > 1 &&
         args.info.kind == Kind::kAllReduce &&
         fits_packets(args.bytes, static_cast<int>(args.info.blocks));
}

template <typename F, Target T>
DREAMCOMM_DEVICE void all_reduce_body(Block<T>& block, AlgorithmId row) {
  if (block.args.size == 1 || row == AlgorithmId::kStaged || row == AlgorithmId::kFlagged) {
    return rows::one_shot<F>(block);
  }
  if (row == AlgorithmId::kTwoShot) return rows::two_shot<F>(block);
  if (row == AlgorithmId::kRing) return rows::ring_all_reduce<F>(block);
  if (!block.open()) return;
  const bool all_in = block.all_in();
  if (row == AlgorithmId::kOneShotInPlace) {
    const bool may = all_in && !block.any_over_itself();
    return may ? rows::one_shot_in_place<F>(block) : rows::one_shot<F>(block);
  }
  if (row == AlgorithmId::kPush && all_in && block.all_out()) return rows::push<F>(block);
  return all_in ? rows::pull<F>(block) : rows::two_shot<F>(block);
}

template <typename F, Target T>
DREAMCOMM_DEVICE void reduce_to_root_body(Block<T>& block, AlgorithmId row) {
  if (row != AlgorithmId::kPush) return rows::two_shot<F>(block);
  if (!block.open()) return;
  const bool may = block.all_in() && block.outs.at[block.args.info.root] != nullptr;
  return may ? rows::push<F>(block) : rows::two_shot<F>(block);
}

template <typename F, Target T>
DREAMCOMM_DEVICE void reduce_scatter_body(Block<T>& block, AlgorithmId row) {
  if (row != AlgorithmId::kInPlace) return rows::reduce_scatter<F>(block);
  if (!block.open()) return;
  return block.all_in() ? rows::reduce_scatter_in_place<F>(block) : rows::reduce_scatter<F>(block);
}

/// Calls that reduce elements of the format F.
template <typename F, Target T>
DREAMCOMM_DEVICE void reduce_body(Block<T>& block) {
  if (uses_packets(block.args)) return rows::one_shot_flagged<F>(block);
  if (!block.rounds.may_begin()) return;
  const auto row = static_cast<AlgorithmId>(block.args.info.row);
  switch (block.args.info.kind) {
    case Kind::kReduceScatter:
      return reduce_scatter_body<F>(block, row);
    case Kind::kReduce:
      return reduce_to_root_body<F>(block, row);
    default:
      return all_reduce_body<F>(block, row);
  }
}

/// Calls that move bytes.
template <Target T>
DREAMCOMM_DEVICE void move_body(Block<T>& block) {
  if (!block.rounds.may_begin()) return;
  const Kind kind = block.args.info.kind;
  const bool fetches = kind == Kind::kAllGather || kind == Kind::kBroadcast;
  if (fetches && static_cast<AlgorithmId>(block.args.info.row) == AlgorithmId::kInPlace) {
    if (!block.open()) return;
    const bool is_there =
        kind == Kind::kBroadcast ? block.ins.at[block.args.info.root] != nullptr : block.all_in();
    if (is_there) return rows::fetch(block);
  }
  switch (kind) {
    case Kind::kAllToAll:
      return rows::all_to_all(block);
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

// Where the elements of a bucket's tensors are, and what brings them elsewhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace dreamcomm {

/// Where a tensor's elements are, over the ranks of a group.
enum class TensorPlacement : std::uint8_t {
  kReplicated,  // every rank has all elements, and all have the same
  kLocal,       // every rank has all elements of its own; their sum is wanted
  kSharded,     // every rank has its rows alone (layout.h)
};

/// A change of a placement.
enum class Move : std::uint8_t {
  kNothing,
  kSum,         // all ranks get the sum: an all_reduce
  kSumRows,     // each rank gets its rows of the sum: a reduce_scatter, or a pass over the heaps
  kGatherRows,  // all ranks get all rows: an all_gather, or a pass over the heaps
  kKeepRows,    // each rank drops the others' rows; nothing is sent
};

/// The difference of two placements.
///
///   from \ to     replicated   local     sharded
///   replicated    nothing      nothing   keep rows
///   local         reduce       nothing   reduce-scatter
///   sharded       gather       gather    nothing
constexpr Move move_between(TensorPlacement from, TensorPlacement to) {
  constexpr auto kNothing = Move::kNothing;
  constexpr std::array<std::array<Move, 3>, 3> kMoves{{
      {kNothing, kNothing, Move::kKeepRows},
      {Move::kSum, kNothing, Move::kSumRows},
      {Move::kGatherRows, Move::kGatherRows, kNothing},
  }};
  return kMoves[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
}

/// Over a mesh of two dimensions: within the group of a shard, and across the replicas of it.
struct MeshPlacement {
  TensorPlacement within = TensorPlacement::kReplicated;
  TensorPlacement across = TensorPlacement::kReplicated;
};

/// The moves of each dimension. Sums are scattered within a group before they are reduced across,
/// and rows are gathered within alone: so the fewest bytes go across.
struct MeshMoves {
  Move within = Move::kNothing;  // first
  Move across = Move::kNothing;
};

constexpr MeshMoves moves_between(MeshPlacement from, MeshPlacement to) {
  return {move_between(from.within, to.within), move_between(from.across, to.across)};
}

}  // namespace dreamcomm

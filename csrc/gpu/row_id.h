// The rows of the GPU's table of algorithms.
#pragma once

#include <cstdint>

namespace dreamcomm::gpu {

/// How a call is carried out; in CallCard::row, the same on all ranks. Rows on registered
/// memory begin with a turn in which the ranks learn whose tensors are registered; if
/// some are not, they go on with the row named last. A row that a kind does not have is
/// taken for kStaged.
enum class RowId : std::uint8_t {
  kStaged,          // any tensors: all kinds; all_reduce in one shot, reduce in two
  kTwoShot,         // any tensors: all_reduce, reduce
  kRing,            // any tensors, not in rank order: all_reduce
  kOneShotInPlace,  // inputs, if no rank's is its output: all_reduce; else kStaged
  kPull,            // inputs: all_reduce; else kTwoShot
  kPush,            // inputs and outputs: all_reduce, reduce; else kPull or kTwoShot
  kInPlace,         // inputs: reduce_scatter, all_gather, broadcast; else kStaged
};

}  // namespace dreamcomm::gpu

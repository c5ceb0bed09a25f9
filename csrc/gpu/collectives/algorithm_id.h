// The rows of the GPU's table of algorithms.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace dreamcomm::gpu {

/// How a call is carried out; in CallInfo::row, the same on all ranks. Rows on registered memory
/// begin with a turn in which the ranks learn which tensors are registered; if some are not, the
/// call continues with the row that is named last. A row that a kind does not have means kStaged.
enum class AlgorithmId : std::uint8_t {
  kStaged,          // any tensors: all kinds; all_reduce in one shot, reduce in two
  kTwoShot,         // any tensors: all_reduce, reduce
  kRing,            // any tensors, not in rank order: all_reduce
  kOneShotInPlace,  // inputs, if no rank's is its output: all_reduce; else kStaged
  kPull,            // inputs: all_reduce; else kTwoShot
  kPush,            // inputs and outputs: all_reduce, reduce; else kPull or kTwoShot
  kInPlace,         // inputs: reduce_scatter, all_gather, broadcast; else kStaged
  kFlagged,         // any tensors of few bytes: all_reduce; else kStaged
};

/// The name in texts for users.
constexpr std::string_view name(AlgorithmId row) {
  constexpr std::string_view kNames[] = {"one_shot", "two_shot", "ring",     "one_shot in place",
                                         "pull",     "push",     "in place", "one_shot flagged"};
  return kNames[static_cast<std::size_t>(row)];
}

/// The row for all_reduce that the option `algorithm` selects, if there is one here. The option's
/// names are those of the CPU's table. The ring is selected only where sums need not be in rank
/// order.
constexpr std::optional<AlgorithmId> row_asked(std::string_view algorithm, bool fixed_order) {
  if (algorithm == "one_shot") return AlgorithmId::kStaged;
  if (algorithm == "direct") return AlgorithmId::kTwoShot;
  if (algorithm == "heap") return AlgorithmId::kPush;
  if (algorithm == "ring" && !fixed_order) return AlgorithmId::kRing;
  return std::nullopt;
}

}  // namespace dreamcomm::gpu

// Selects the row of a call, and its number of blocks. Pure: all ranks of a group select the same.
#pragma once

#include <cstddef>
#include <optional>

#include "core/types.h"
#include "gpu/collectives/algorithm_id.h"
#include "gpu/host/launch.h"

namespace dreamcomm::gpu {

/// The costs that the choice is based on, in seconds; equal on all ranks. They are fixed. With
/// them, ranks that share an H200 change from one row to the next at about the sizes where both
/// take the same time.
struct Costs {
  double turn = 4e-6;  // a store and a load across the memory of two kernels
  double per_byte = 0.5e-12;

  bool operator==(const Costs&) const = default;
};

struct Choice {
  AlgorithmId row = AlgorithmId::kStaged;
  Grid grid;
};

/// The inputs of a choice; equal on all ranks.
struct Question {
  Kind kind = Kind::kBarrier;
  std::size_t bytes = 0;  // of a block
  int size = 1;           // ranks
  int most_blocks = 1;    // that each rank may have
  int lanes = 512;
  bool registered = false;             // whether the ranks have registered memory
  std::optional<AlgorithmId> asked{};  // for all_reduce, regardless of costs
  Costs costs{};
};

/// Seconds that an all_reduce is expected to take by a row, on tensors that suit it. The bytes are
/// those of the rows' formulas.
double expected_seconds(AlgorithmId row, const Question& question);

Choice choose(const Question& question);

}  // namespace dreamcomm::gpu

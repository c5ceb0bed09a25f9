// How a call is carried out: which row, and with how many blocks. Pure: all ranks of a
// group choose alike.
#pragma once

#include <cstddef>

#include "core/types.h"
#include "gpu/launch.h"
#include "gpu/row_id.h"

namespace dreamcomm::gpu {

struct Choice {
  RowId row = RowId::kStaged;
  Grid grid;
};

/// What a choice depends on; equal on all ranks.
struct Question {
  Kind kind = Kind::kBarrier;
  std::size_t bytes = 0;  // of a block
  int size = 1;           // ranks
  int most_blocks = 1;    // that each rank may have
  int lanes = 512;
};

/// Seconds that a call of all_reduce is expected to take by a row on any tensors. The bytes
/// are those of the rows' formulas; what a turn and a byte cost is fixed so far, not
/// measured.
double expected_seconds(RowId row, std::size_t bytes, int size);

Choice choose(const Question& question);

}  // namespace dreamcomm::gpu

// The part of a parameter that one rank's optimizer steps, and of its gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace dreamcomm {

/// A parameter is sharded on its first dimension by torch.chunk's rule: each rank has as many rows,
/// except the last ones. Elements count in the contiguous parameter.
struct ShardRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};
inline ShardRange rows_of_rank(std::int64_t rows, std::int64_t row_numel, int world, int rank) {
  const std::int64_t each = (rows + world - 1) / world;
  const std::int64_t begin = std::min(rows, each * rank);
  return {begin * row_numel, (std::min(rows, begin + each) - begin) * row_numel};
}

struct Shard {
  bool sharded = false;     // there is a sharded optimizer
  bool replicated = false;  // a scalar, which all ranks step
  at::ScalarType sum_type = at::kFloat;
  /// What the parameter's `grad` becomes when it is reduced; undefined: it stays.
  at::Tensor stand_in;
  /// This rank's elements of the average, flat, in `sum_type`; made by the first reduction.
  at::Tensor gradient;
  bool valid = false;  // it holds an average
  bool adds = false;   // the next reduction is added to it
  /// The optimizer's, flat and alike: the copy of more bits, and what it keeps.
  at::Tensor master;
  std::array<at::Tensor, 3> state;
};

}  // namespace dreamcomm

// Which elements of a parameter a rank owns: the one place that knows.
//
//   rows of a (5) and b (3), world 2:    a0 a1 a2 | a3 a4      b0 b1 | b2
//   rank 0: a0 a1 a2 b0 b1               rank 1: a3 a4 b2
//
// A parameter is sharded on its first dimension by torch.chunk's rule: each rank has
// ceil(rows / world) rows until none are left. A scalar has no dimension to shard: every rank has
// all of it. Rank 0 has no fewer rows of any parameter than the others.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace dreamcomm {

/// Consecutive numbers of rows, or of elements in the order of memory.
struct RankRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

inline RankRange rows_of_rank(std::int64_t rows, int world, int rank) {
  const std::int64_t each = (rows + world - 1) / world;
  const std::int64_t begin = std::min(rows, each * rank);
  return {begin, std::min(rows, begin + each) - begin};
}

/// A rank's elements of a parameter whose rows lie in memory one after the other.
inline RankRange elements_of_rank(c10::IntArrayRef shape, int world, int rank) {
  if (shape.empty()) return {0, 1};
  const RankRange rows = rows_of_rank(shape[0], world, rank);
  const std::int64_t width = c10::multiply_integers(shape.slice(1));
  return {rows.begin * width, rows.count * width};
}

/// The rows of several tensors in one buffer: a section for each rank, all as wide as rank 0's.
class Sections {
 public:
  Sections(std::vector<c10::IntArrayRef> shapes, int world)
      : shapes_(std::move(shapes)), world_(world) {
    for (const c10::IntArrayRef shape : shapes_) width_ += elements_of_rank(shape, world, 0).count;
  }
  std::int64_t width() const { return width_; }
  /// Calls `visit(i, place, elements)` for each tensor i: a rank's elements of it, and where they
  /// begin in the rank's section.
  template <typename Visit>
  void of_rank(int rank, Visit&& visit) const {
    std::int64_t place = 0;
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      const RankRange elements = elements_of_rank(shapes_[i], world_, rank);
      visit(i, place, elements);
      place += elements.count;
    }
  }

 private:
  const std::vector<c10::IntArrayRef> shapes_;
  const int world_;
  std::int64_t width_ = 0;
};

}  // namespace dreamcomm

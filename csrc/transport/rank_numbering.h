// How errors number ranks.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace dreamcomm {

/// Numbers the ranks of a part of a group as the whole group does, by their index in the part. By
/// default both are the same.
class RankNumbering {
 public:
  RankNumbering() = default;
  RankNumbering(std::vector<int> ranks, int size) : ranks_(std::move(ranks)), size_(size) {}

  int of(int index) const {
    return ranks_.empty() ? index : ranks_[static_cast<std::size_t>(index)];
  }
  /// Ranks of the whole group; `part` are those of the part.
  int size(int part) const { return ranks_.empty() ? part : size_; }

 private:
  std::vector<int> ranks_;
  int size_ = 0;
};

}  // namespace dreamcomm

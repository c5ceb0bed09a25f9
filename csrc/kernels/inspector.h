// The sum of the squares of a row of elements, and whether all are finite.
//
// Elements are taken a block at a time, each block by its place in the row: element i
// of a block is added to lane i % 16, and the lanes are added in pairs. The sum of block b
// is added to column b % 256, and in the end the columns are added in pairs. All in
// float64. So the sum depends on the row alone, not on how it arrives, nor on the width
// of the machine's vectors, nor on how many blocks a GPU takes at a time.
#pragma once

#include <array>
#include <cstddef>

#include "core/types.h"

namespace dreamcomm::kernels {

class Inspector {
 public:
  explicit Inspector(DType type) : type_(type), item_(item_size(type)) {}

  /// Elements that the present block still takes, at least one.
  std::size_t room() const { return kBlock - pending_; }
  /// The row's next elements, room() at the most.
  void add(const std::byte* data, std::size_t count);
  /// Ends the row.
  void finish();

  double squares() const;
  bool finite() const { return finite_; }

  static constexpr std::size_t kBlock = 1024;   // elements
  static constexpr std::size_t kLanes = 16;     // of a block
  static constexpr std::size_t kColumns = 256;  // of blocks

 private:
  void take(const std::byte* block, std::size_t count);

  const DType type_;
  const std::size_t item_;
  std::size_t pending_ = 0;
  alignas(64) std::array<std::byte, kBlock * sizeof(double)> block_;  // what waits for the rest
  std::size_t blocks_ = 0;
  std::array<double, kColumns> columns_{};
  bool finite_ = true;
};

/// The sum of the squares of `count` elements, as an Inspector finds it.
double sum_of_squares(DType type, const std::byte* data, std::size_t count);

}  // namespace dreamcomm::kernels

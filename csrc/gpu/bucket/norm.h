// The sum of the squares of a bucket's elements, in the order of kernels/inspector.h, by
// the lanes of many blocks.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "gpu/collectives/device.h"
#include "gpu/collectives/target.h"
#include "kernels/inspector.h"

namespace dreamcomm::gpu {

/// A sum of squares. It is never negative, so its sign bit marks that an element was not finite.
/// (A sum of float64 may be infinite without such an element.)
struct SquareSum {
  double value = 0.0;

  DREAMCOMM_DEVICE static SquareSum of(double squares, bool finite) {
    const auto bits = std::bit_cast<std::uint64_t>(squares) & ~kSign;
    return {std::bit_cast<double>(finite ? bits : bits | kSign)};
  }
  DREAMCOMM_DEVICE double squares() const {
    return std::bit_cast<double>(std::bit_cast<std::uint64_t>(value) & ~kSign);
  }
  DREAMCOMM_DEVICE bool finite() const {
    return (std::bit_cast<std::uint64_t>(value) & kSign) == 0;
  }
  DREAMCOMM_DEVICE void add(SquareSum other) {
    *this = of(squares() + other.squares(), finite() && other.finite());
  }

 private:
  static constexpr std::uint64_t kSign = std::uint64_t{1} << 63U;
};

/// The sums of one tile: the lanes keep what they have written, then some of them add it up. W is
/// float or double.
template <typename W, std::size_t kTile>
class TileSums {
  static constexpr std::size_t kBlock = kernels::Inspector::kBlock;
  static constexpr std::size_t kLanes = kernels::Inspector::kLanes;
  static constexpr std::size_t kSums = kTile / kBlock * kLanes;
  /// Padding by which consecutive blocks begin in different halves of a GPU's shared memory banks.
  static constexpr std::size_t kPadding = kLanes;
  static constexpr std::size_t kValues = kTile / kBlock * (kBlock + kPadding);

 public:
  static constexpr std::size_t kBytes = kValues * sizeof(W) + kSums * sizeof(SquareSum);

  DREAMCOMM_DEVICE explicit TileSums(std::byte* scratch)
      : values_(reinterpret_cast<W*>(scratch)),
        sums_(reinterpret_cast<SquareSum*>(scratch + kValues * sizeof(W))) {}

  DREAMCOMM_DEVICE void keep(std::size_t index, W value) { values_[padded(index)] = value; }
  /// Where to keep elements from `index` on that are in one block.
  DREAMCOMM_DEVICE std::byte* place(std::size_t index) {
    return reinterpret_cast<std::byte*>(values_ + padded(index));
  }

  /// Adds up the `count` elements of a tile. All lanes call it, when each has kept its own.
  /// Afterwards they may keep the next tile's. INVARIANT: no lane reads a value after the second
  /// sync(), and no lane writes a sum again before the next tile's first sync(), which a lane that
  /// still reads sums reaches only afterwards.
  template <Target T>
  DREAMCOMM_DEVICE void add_up(const T& target, std::size_t count, double* partials) {
    const auto lane = static_cast<std::size_t>(target.lane());
    const auto lanes = static_cast<std::size_t>(target.lanes());
    target.sync();
    for (std::size_t s = lane; s < kSums; s += lanes) sums_[s] = sum_of(s, count);
    target.sync();
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
      for (std::size_t s = lane; s < kTile / kBlock * half; s += lanes) {
        SquareSum* const sums = sums_ + s / half * kLanes + s % half;
        sums[0].add(sums[half]);
        if (half == 1 && s * kBlock < count) partials[s] = sums[0].value;
      }
      if (half > 1) target.sync();
    }
  }

 private:
  DREAMCOMM_DEVICE static std::size_t padded(std::size_t index) {
    return index + index / kBlock * kPadding;
  }

  /// Lane s % kLanes of block s / kLanes.
  DREAMCOMM_DEVICE SquareSum sum_of(std::size_t s, std::size_t count) const {
    constexpr std::size_t kAhead = 8;  // loads under way
    const std::size_t begin = s / kLanes * kBlock;
    const std::size_t size = begin >= count ? 0 : begin + kBlock < count ? kBlock : count - begin;
    const W* const values = values_ + padded(begin);
    double sum = 0.0;
    bool finite = true;
    const auto add = [&](W next) {
      const auto value = static_cast<double>(next);
      sum += value * value;
      if constexpr (sizeof(W) == sizeof(double)) finite = finite && value - value == 0;
    };
    std::size_t i = s % kLanes;
    for (; i + (kAhead - 1) * kLanes < size; i += kAhead * kLanes) {
      W next[kAhead];
      for (std::size_t k = 0; k < kAhead; ++k) next[k] = values[i + k * kLanes];
      for (std::size_t k = 0; k < kAhead; ++k) add(next[k]);
    }
    for (; i < size; i += kLanes) add(values[i]);
    // As many squares of float32 are finite in float64.
    if constexpr (sizeof(W) < sizeof(double)) finite = sum - sum == 0;
    return SquareSum::of(sum, finite);
  }

  W* values_;
  SquareSum* sums_;
};

inline constexpr std::size_t kFinishScratch = kernels::Inspector::kColumns * sizeof(SquareSum);

/// The end of an inspection, by one block: adds up the partials of all blocks of a buffer.
/// `scratch`: kFinishScratch bytes of the block's own, aligned to 16.
template <Target T>
DREAMCOMM_DEVICE void finish_body(const T& target, const double* partials, std::size_t count,
                                  double* squares, bool* finite, std::byte* scratch) {
  constexpr std::size_t kColumns = kernels::Inspector::kColumns;
  auto* columns = reinterpret_cast<SquareSum*>(scratch);
  const auto lane = static_cast<std::size_t>(target.lane());
  const auto lanes = static_cast<std::size_t>(target.lanes());
  constexpr std::size_t kAhead = 8;  // loads under way, as each takes as long as many additions
  for (std::size_t c = lane; c < kColumns; c += lanes) {
    SquareSum sum;
    std::size_t i = c;
    for (; i + (kAhead - 1) * kColumns < count; i += kAhead * kColumns) {
      double next[kAhead];
      for (std::size_t k = 0; k < kAhead; ++k) next[k] = partials[i + k * kColumns];
      for (std::size_t k = 0; k < kAhead; ++k) sum.add({next[k]});
    }
    for (; i < count; i += kColumns) sum.add({partials[i]});
    columns[c] = sum;
  }
  for (std::size_t half = kColumns / 2; half > 0; half /= 2) {
    target.sync();
    for (std::size_t c = lane; c < half; c += lanes) columns[c].add(columns[c + half]);
  }
  if (lane == 0) {
    *squares = columns[0].squares();
    *finite = columns[0].finite();
  }
}

}  // namespace dreamcomm::gpu

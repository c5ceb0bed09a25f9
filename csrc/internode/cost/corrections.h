// Factors for a model's times, at sizes for which calls were measured.
#pragma once

#include <array>
#include <cstddef>

namespace dreamcomm {

/// The measured time of a call over the model's. The model has only a latency and bytes per second.
/// Links and processors are more complex: shaped links let some bytes through at once, and ranks
/// that share processors hide some waits and add others.
struct Corrections {
  /// Sizes of an all_reduce; 0 bytes are a barrier.
  static constexpr std::array<std::size_t, 8> kSizes{0,
                                                     std::size_t{1} << 10,
                                                     std::size_t{4} << 10,
                                                     std::size_t{16} << 10,
                                                     std::size_t{64} << 10,
                                                     std::size_t{256} << 10,
                                                     std::size_t{1} << 20,
                                                     std::size_t{4} << 20};

  std::array<double, kSizes.size()> factors = none();

  /// Interpolates between two sizes; beyond them it stays the same.
  double at(double bytes) const;

  bool operator==(const Corrections&) const = default;

 private:
  static constexpr std::array<double, kSizes.size()> none() {
    std::array<double, kSizes.size()> ones{};
    for (double& one : ones) one = 1;
    return ones;
  }
};

}  // namespace dreamcomm

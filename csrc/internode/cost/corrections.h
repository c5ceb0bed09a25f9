// What a model's times are multiplied by, at sizes for which calls were measured.
#pragma once

#include <array>
#include <cstddef>

namespace dreamcomm {

/// The time of a call over what the model says. The model knows a latency and bytes per second;
/// links and processors have more to them: shaped links let some bytes through at once, ranks that
/// share processors hide some waits and add others.
struct Corrections {
  /// Of all_reduce; of no bytes it is a barrier.
  static constexpr std::array<std::size_t, 8> kSizes{0,
                                                     std::size_t{1} << 10,
                                                     std::size_t{4} << 10,
                                                     std::size_t{16} << 10,
                                                     std::size_t{64} << 10,
                                                     std::size_t{256} << 10,
                                                     std::size_t{1} << 20,
                                                     std::size_t{4} << 20};

  std::array<double, kSizes.size()> factors = none();

  /// Between two sizes it changes evenly, beyond them not at all.
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

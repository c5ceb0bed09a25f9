// Costs by which algorithms are chosen: how long turns and copies take on this machine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace dreamcomm {

/// The ways in which collectives move bytes. The bytes that count are named beside each.
enum class CopyKind : std::uint8_t {
  kGive,        // into the own page: bytes written
  kTake,        // out of peers' pages: bytes written
  kFold,        // pages of all ranks reduced into the own tensor: bytes read
  kPull,        // copied out of peers' heaps: bytes written
  kFoldHeaps,   // tensors in heaps reduced into the own: bytes read
  kReduceHeaps  // tensors in heaps reduced into all of them: bytes read
};
inline constexpr std::size_t kCopyKinds = 6;

/// The cost of one call to a rank, in turns and bytes.
struct CostTerms {
  double turns = 0;
  std::array<double, kCopyKinds> bytes{};

  CostTerms with(CopyKind kind, double amount) const {
    CostTerms more = *this;
    more.bytes[static_cast<std::size_t>(kind)] += amount;
    return more;
  }
};

/// Measured on one machine for one world size (comm/tuning/measure.h). The cost per byte depends on
/// how much memory a rank's call touches: which cache the bytes are in.
struct Costs {
  static constexpr std::array<std::size_t, 6> kSizes{std::size_t{4} << 10,   std::size_t{32} << 10,
                                                     std::size_t{256} << 10, std::size_t{1} << 20,
                                                     std::size_t{8} << 20,   std::size_t{32} << 20};
  using Rates = std::array<double, kSizes.size()>;  // seconds per byte at each of kSizes

  double turn = 0;  // seconds
  std::array<Rates, kCopyKinds> rates{};

  /// The rounded costs of two ranks on two cores of one server: for choices that do not depend on
  /// the machine.
  static const Costs& fixed();
  /// Seconds of a call with these terms, whose tensors have `bytes` a rank, input and output;
  /// between two of kSizes the rate is interpolated over the logarithm.
  double seconds(const CostTerms& terms, std::size_t bytes) const;

  bool operator==(const Costs&) const = default;
};

/// Lines of names and numbers, exact to the bit. from_text returns nothing for any other text.
std::string to_text(const Costs& costs);
std::optional<Costs> from_text(const std::string& text);

}  // namespace dreamcomm

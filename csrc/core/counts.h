// The divisor of a pass's gradients: the sum of the counts that all ranks give.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>

namespace dreamcomm {

/// Why a rank has no count.
enum class CountFault : std::uint8_t {
  kMissing = 1,  // a backward pass without a count
  kTwice,        // several counts before a backward pass
  kReduced,      // the pass adds to gradients of an earlier reduction
};

/// One rank's count, in 64 bits:
///
///   0 w...w     a weight: a double that is not negative
///   1 0 n...n   a whole number below 2^62
///   1 1 0...f   a CountFault
class RankCount {
 public:
  static constexpr std::int64_t kMost = (std::int64_t{1} << 62) - 1;
  static RankCount of_whole(std::int64_t number);
  static RankCount of_weight(double weight);
  static RankCount of_fault(CountFault fault);
  explicit RankCount(std::uint64_t bits) : bits_(bits) {}

  std::uint64_t bits() const { return bits_; }
  std::optional<CountFault> fault() const;
  bool is_whole() const;
  std::int64_t whole() const;
  double weight() const;  // also of a whole number

 private:
  std::uint64_t bits_;
};

/// The counts of one reducing pass, for the calls that reduce its buckets one after the other. The
/// first call takes all ranks' counts; the later ones find them known, on all ranks alike. A
/// call and the thread that waits for it may ask at the same time.
class GradientCounts {
 public:
  /// `along_tree`: weights are added along the tree of ranks, so that the sum is the same for each
  /// number of ranks.
  GradientCounts(RankCount own, bool along_tree) : own_(own), along_tree_(along_tree) {}

  RankCount own() const { return own_; }
  bool is_known() const {
    const std::scoped_lock lock(mutex_);
    return known_;
  }
  /// Takes the counts of all ranks, in their order.
  void take(std::span<const std::uint64_t> counts);
  /// Leaves a place where an earlier call of the same group writes the counts, or nothing.
  void expect_at(std::span<const std::uint64_t> counts) { place_ = counts; }
  /// Throws Error(kMismatch) where a rank has no count: on all ranks alike. Takes the counts from
  /// the place of expect_at() first.
  void require();
  /// The sum; infinite where it is 0, so that gradients become zeros. After require().
  double divisor() const { return divisor_; }

 private:
  void add_up(std::span<const std::uint64_t> counts);

  const RankCount own_;
  const bool along_tree_;
  mutable std::mutex mutex_;
  bool known_ = false;
  double divisor_ = 1;
  std::string refusal_;
  std::span<const std::uint64_t> place_;
};

}  // namespace dreamcomm

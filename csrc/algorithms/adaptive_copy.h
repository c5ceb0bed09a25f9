// Writes pages in the way that has recently been faster.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "core/flag.h"

namespace dreamcomm {

/// A page that is written again is still in the caches of its readers. Where the cores share a
/// cache, that costs little. Where they do not (two sockets, two dies of a server, a virtual
/// machine whose cores the host has moved apart), taking the lines back, or reading them from the
/// other's cache, takes ten times as long as writing the page past the caches: 430 nanoseconds a
/// KiB instead of 40 on one server. Which case applies can change while a program runs.
///
/// So rounds are timed, from the writing of the own page until the peers' pages are read. All ranks
/// do the same in a round: in some all write plainly, in some all write past the caches. From the
/// next call on all ranks do what was faster for rank 0 on average: if one does and another does
/// not, both lose. The way in use is timed in every round, so it is left a few calls after the
/// cores have been moved apart. The other way is only found to be better in the next trial. (Each
/// rank counts its own first rounds of a size, in which it tries most. The ranks agree on them as
/// long as all write the same sizes.) No bit of a result depends on it.
///
/// Not thread-safe, except the counts: one call of a group runs at a time.
class AdaptiveCopy {
 public:
  using Clock = std::chrono::steady_clock;
  explicit AdaptiveCopy(Clock::time_point (*now)() = Clock::now) : now_(now) {}

  static constexpr std::uint32_t kInARow = 16;             // rounds for one purpose
  static constexpr std::uint32_t kSettling = kInARow / 2;  // the first of these, not timed
  static constexpr std::uint32_t kTrials = 4 * kInARow;    // the first rounds of a size

  /// Copies into this rank's page of round `round`.
  void write(std::uint32_t round, std::byte* to, const std::byte* from, std::size_t bytes);
  /// Ends the round: the peers' pages have been read.
  void close();

  /// Sizes of writes, a bit for each size class.
  using Sizes = std::uint16_t;
  /// The size classes that this rank would write past the caches.
  Sizes wishes() const;
  /// Follows the wishes of rank 0, which arrive with the call under way.
  void follow(Sizes wishes) { past_sizes_ = wishes; }

  // Any thread:
  std::uint64_t writes() const { return count(writes_); }      // large enough for either way
  std::uint64_t streamed() const { return count(streamed_); }  // of these, those past the caches

 private:
  struct Way {
    double cost = 0;  // nanoseconds per byte, a recent average; 0: not known yet
    void learn(double sample, bool trial);
  };
  /// Rounds with writes of similar size.
  struct SizeClass {
    std::uint32_t rounds = 0;
    bool past_lately = false;    // how the last round wrote
    std::uint32_t in_a_row = 0;  // consecutive rounds that have written so
    Way plain;
    Way past;
    bool prefers_past() const {
      return plain.cost > 0 && past.cost > 0 && kClearly * past.cost < plain.cost;
    }
  };
  static constexpr double kClearly = 1.1;  // a way must be this much faster to be taken
  static std::uint64_t count(const Gauge& gauge) {
    return static_cast<std::uint64_t>(gauge.read());
  }
  void open(std::uint32_t round, std::size_t bytes);

  std::array<SizeClass, 10> classes_;
  Sizes past_sizes_ = 0;
  // The round under way, if it has been written to.
  SizeClass* similar_ = nullptr;
  std::uint32_t round_ = 0;
  bool past_ = false;
  bool timed_ = false;
  bool trial_ = false;
  std::size_t bytes_ = 0;
  Clock::time_point begin_;
  Clock::time_point (*now_)();

  Gauge writes_;
  Gauge streamed_;
};

}  // namespace dreamcomm

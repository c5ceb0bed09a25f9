// Writes pages in the way that has been the faster one lately.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "core/flag.h"

namespace dreamcomm {

/// A page that is written again is still held by the caches of those who read it.
/// Where the cores share a cache, that costs little; where they do not (two sockets,
/// two dies of a server, a virtual machine whose cores the host has moved apart),
/// taking the lines back, or reading them from the other's cache, takes ten times as
/// long as if the page is written past the caches: 430 nanoseconds a KiB instead of
/// 40 on one server. Which is the case can change while a program runs.
///
/// So rounds are timed, from the writing of the own page until the peers' pages are
/// read. Rounds go in step on all ranks: in some all write plainly, in some all write
/// past the caches. What was faster for rank 0 on the average all ranks do from the next
/// call on: if one does and another does not, both lose. The way in use is timed in every
/// round, so that it is left a few calls after the cores have been moved apart; the other
/// one has to wait for the next trial to be found better. (Each rank counts its
/// own first rounds of a size, in which it tries most; they are in step as long as all
/// ranks write alike.) No bit of a result depends on it.
///
/// Not thread-safe but for the counts: one call of a group runs at a time.
class AdaptiveCopy {
 public:
  using Clock = std::chrono::steady_clock;
  explicit AdaptiveCopy(Clock::time_point (*now)() = Clock::now) : now_(now) {}

  static constexpr std::uint32_t kInARow = 16;             // rounds for one purpose
  static constexpr std::uint32_t kSettling = kInARow / 2;  // of these, not timed
  static constexpr std::uint32_t kTrials = 4 * kInARow;    // the first rounds of a size

  /// Copies into this rank's page of round `round`.
  void write(std::uint32_t round, std::byte* to, const std::byte* from, std::size_t bytes);
  /// The peers' pages of the last round have been read.
  void close();

  /// Sizes of writes, a bit for each class of them.
  using Sizes = std::uint16_t;
  /// Those that this rank would have written past the caches.
  Sizes wishes() const;
  /// Follows the wishes of rank 0, told with the call under way.
  void follow(Sizes wishes) { past_sizes_ = wishes; }

  // Of any thread:
  std::uint64_t writes() const { return count(writes_); }      // of a size that leaves the choice
  std::uint64_t streamed() const { return count(streamed_); }  // of these, past the caches

 private:
  struct Way {
    double cost = 0;  // nanoseconds per byte, on the average of late; 0: not known yet
    void learn(double sample, bool trial);
  };
  /// Rounds with writes of similar size.
  struct SizeClass {
    std::uint32_t rounds = 0;
    bool past_lately = false;    // how the last round wrote
    std::uint32_t in_a_row = 0;  // rounds that have written so
    Way plain;
    Way past;
    bool prefers_past() const {
      return plain.cost > 0 && past.cost > 0 && kClearly * past.cost < plain.cost;
    }
  };
  static constexpr double kClearly = 1.1;  // so much faster before the way changes
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

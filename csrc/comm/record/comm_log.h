// Sums over all operations of a rank, by kind and size: the contents of a summary table.
//
// One writer adds; any thread reads meanwhile. The numbers of a line are each whole, but not of
// one moment.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/flag.h"
#include "core/record.h"

namespace dreamcomm {

/// Counts durations by size: eight equal steps for each doubling, so that a quantile is off by at
/// most 6 %.
class Histogram {
 public:
  void add(std::int64_t nanoseconds) { counts_[place_of(nanoseconds)].grow(1); }
  /// In nanoseconds, the middle of its step; 0 if nothing was added. `share`: from 0 to 1.
  std::int64_t quantile(double share) const;

 private:
  static constexpr unsigned kSteps = 8;
  static constexpr unsigned kDoublings = 44;  // up to 4 hours
  static std::size_t place_of(std::int64_t nanoseconds);
  static std::int64_t middle_of(std::size_t place);
  std::array<Gauge, std::size_t{kSteps} * kDoublings> counts_;
};

class CommLog {
 public:
  struct Line {
    Kind kind = Kind::kBarrier;
    std::int64_t bytes = 0;  // of a block; -1: of many sizes, those beyond kMostLines
    std::int64_t calls = 0;
    std::int64_t failed = 0;
    std::int64_t total_ns = 0;
    std::int64_t waited_ns = 0;  // for the last rank to enter
    std::int64_t p50_ns = 0;
    std::int64_t p99_ns = 0;
    std::int64_t in_place = 0;
    int slowest = -1;                 // the rank with the largest total wait for it
    std::int64_t for_slowest_ns = 0;  // how long
  };
  /// The lines of a kind; its further sizes share one.
  static constexpr std::size_t kMostLines = 64;

  explicit CommLog(int size) : size_(static_cast<std::size_t>(size)) {}
  /// Adds an operation that has ended. Only the writer calls this.
  void add(const Record& record);
  std::vector<Line> lines() const;

 private:
  using Key = std::pair<Kind, std::int64_t>;
  struct Sums {
    explicit Sums(std::size_t size) : waits(size) {}
    Gauge calls;
    Gauge failed;
    Gauge total_ns;
    Gauge waited_ns;
    Gauge in_place;
    std::vector<Gauge> waits;  // by the rank waited for
    Histogram histogram;
  };
  Sums& sums_of(Key key);
  static Line line_of(Key key, const Sums& sums);

  const std::size_t size_;
  mutable std::mutex mutex_;  // for insertions and readers; the writer's lookups need none
  std::map<Key, std::unique_ptr<Sums>> sums_;
  std::array<std::size_t, kKinds> counts_{};  // the writer's: keys of each kind
  Key last_key_{};                            // the writer's
  Sums* last_ = nullptr;
};

}  // namespace dreamcomm

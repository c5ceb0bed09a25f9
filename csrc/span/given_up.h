// Ranks of other hosts that have given the group up and live on, with all their connections.
#pragma once

#include <chrono>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "core/request.h"
#include "span/causes.h"

namespace dreamcomm {

/// Found in the store, while a rank waits. INVARIANT: what they sent before has had a while to come
/// when they are taken for lost: the time between two looks.
class GivenUp {
 public:
  /// Nearly every wait is shorter: only then does it cost a look.
  static constexpr std::chrono::milliseconds kBetween{350};

  /// For a wait that begins now, or has begun then. `causes` must outlive this.
  explicit GivenUp(const Causes& causes, Clock::time_point begin = Clock::now())
      : causes_(causes), next_(begin + kBetween) {}

  /// Those of `ranks` that had also given up at the look before; none if the next look is not due.
  std::vector<int> among(std::span<const int> ranks) {
    const Clock::time_point now = Clock::now();
    if (now < next_) return {};
    next_ = now + kBetween;
    const std::set<int> before = std::exchange(seen_, {});
    if (ranks.empty() || !causes_.has_any_given_up()) return {};
    std::vector<int> found;
    for (const int rank : ranks) {
      if (Clock::now() - now > kLongest) break;
      if (!causes_.has_given_up(rank)) continue;
      seen_.insert(rank);
      if (before.count(rank) > 0) found.push_back(rank);
    }
    return found;
  }

 private:
  static constexpr std::chrono::milliseconds kLongest{250};  // of a look

  const Causes& causes_;
  Clock::time_point next_;
  std::set<int> seen_;
};

}  // namespace dreamcomm

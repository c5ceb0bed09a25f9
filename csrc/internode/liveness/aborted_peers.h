// Ranks of other hosts that have aborted the group and live on, with all their connections.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <iterator>
#include <set>
#include <span>
#include <vector>

#include "core/request.h"
#include "internode/liveness/failure_cause.h"

namespace dreamcomm {

/// Found in the store, while a rank waits. INVARIANT: what they sent before has had a while to come
/// when they are taken for lost: the time between two looks.
class AbortedPeers {
 public:
  /// Nearly every wait is shorter: only then does it cost a look.
  static constexpr std::chrono::milliseconds kBetween{350};

  /// For a wait that begins now, or has begun then. `causes` must outlive this.
  explicit AbortedPeers(const FailureCause& causes, Clock::time_point begin = Clock::now())
      : failure_cause_(causes), next_(begin + kBetween) {}

  /// Those of `ranks` of whom a look before has shown it; none if the next look is not due, or
  /// could last beyond the deadline of what is waited for.
  std::vector<int> among(std::span<const int> ranks, Clock::time_point deadline) {
    const Clock::time_point now = Clock::now();
    if (now < next_ || ranks.empty() || deadline - now < longest()) return {};
    std::vector<int> found;
    std::copy_if(ranks.begin(), ranks.end(), std::back_inserter(found),
                 [this](int rank) { return seen_.contains(rank); });
    if (found.empty()) look(ranks);
    next_ = Clock::now() + kBetween;
    return found;
  }

  /// Of a look: a store that does not answer is waited for once, one that is far away twice.
  std::chrono::milliseconds longest() const { return 2 * failure_cause_.patience(); }

 private:
  /// Goes on where the one before had to end: a store that is far away answers for few in the time.
  void look(std::span<const int> ranks) {
    if (!any_) any_ = failure_cause_.has_any_aborted();
    if (!any_) return;
    const Clock::time_point end = Clock::now() + kForMore;
    for (std::size_t i = 0; i < ranks.size() && (i == 0 || Clock::now() < end); ++i) {
      const int rank = ranks[at_++ % ranks.size()];
      if (!seen_.contains(rank) && failure_cause_.has_aborted(rank)) seen_.insert(rank);
    }
  }

  static constexpr std::chrono::milliseconds kForMore{250};  // than one rank

  const FailureCause& failure_cause_;
  Clock::time_point next_;
  bool any_ = false;    // as nobody takes it back
  std::set<int> seen_;  // likewise
  std::size_t at_ = 0;  // counts those looked at
};

}  // namespace dreamcomm

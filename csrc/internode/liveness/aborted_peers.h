// Finds ranks of other hosts that have aborted the group but still run, with all their connections.
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

/// Queries the store while a rank waits.
/// INVARIANT: messages that they sent before have had time to arrive when the ranks are taken for
/// lost: the time between two queries.
class AbortedPeers {
 public:
  /// Nearly every wait is shorter: only longer ones cost a query.
  static constexpr std::chrono::milliseconds kBetween{350};

  /// For a wait that begins now, or began then. `causes` must outlive this.
  explicit AbortedPeers(const FailureCause& causes, Clock::time_point begin = Clock::now())
      : failure_cause_(causes), next_(begin + kBetween) {}

  /// Returns those of `ranks` that an earlier query has found. Returns none if the next query is
  /// not due, or could last beyond the deadline of the wait.
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

  /// The longest duration of a query: a store that does not answer is waited for once, a slow one
  /// twice.
  std::chrono::milliseconds longest() const { return 2 * failure_cause_.patience(); }

 private:
  /// Continues where the last query had to end: a slow store answers for few ranks in the time.
  void look(std::span<const int> ranks) {
    if (!any_) any_ = failure_cause_.has_any_aborted();
    if (!any_) return;
    const Clock::time_point end = Clock::now() + kForMore;
    for (std::size_t i = 0; i < ranks.size() && (i == 0 || Clock::now() < end); ++i) {
      const int rank = ranks[at_++ % ranks.size()];
      if (!seen_.contains(rank) && failure_cause_.has_aborted(rank)) seen_.insert(rank);
    }
  }

  static constexpr std::chrono::milliseconds kForMore{250};  // time to query more than one rank

  const FailureCause& failure_cause_;
  Clock::time_point next_;
  bool any_ = false;    // never reset: an abort is final
  std::set<int> seen_;  // likewise
  std::size_t at_ = 0;  // counts the queried ranks
};

}  // namespace dreamcomm

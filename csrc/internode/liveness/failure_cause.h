// Finds out why a rank of another host is lost, as far as this rank can know.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "core/error.h"
#include "internode/liveness/abort_reasons.h"
#include "internode/liveness/connection_monitor.h"

namespace dreamcomm {

/// A rank that aborts the group reports why before its connections end. A rank that has learned of
/// a death in another group, or in a message, leaves this group cleanly and reports nothing: the
/// cause is the rank that it lost.
/// INVARIANT: a rank that waits for it reports that lost rank, too. The lost rank's connection to
/// this rank had ended before the other rank could learn of it and leave. The moment in which the
/// other rank is queried gives that end time to arrive.
class FailureCause {
 public:
  /// `reasons` and `monitor` must outlive this. `here` describes the ranks of this rank's own host
  /// that have died or aborted the group.
  FailureCause(const AbortReasons& reasons, ConnectionMonitor& monitor,
               std::function<std::string()> here = {})
      : reasons_(reasons), monitor_(monitor), here_(std::move(here)) {}

  /// The cause for an awaited rank whose connection ended with `failure`. Takes a moment. Any
  /// thread.
  std::string of(int rank, const std::string& failure) const {
    const std::string told = told_by(rank);
    return told.empty() ? failure + others(rank) : told;
  }

  /// The rank's own report, or ""; takes up to a moment. Any thread.
  std::string told_by(int rank, std::chrono::milliseconds moment = AbortReasons::kMoment) const {
    return reasons_.of(rank, moment);
  }

  /// True if a rank, or any rank, has aborted the group, as far as the store knows now. Any thread.
  bool has_aborted(int rank) const {
    return !reasons_.of(rank, std::chrono::milliseconds(0)).empty();
  }

  bool has_any_aborted() const { return reasons_.any(); }

  /// How long one of these queries may take.
  std::chrono::milliseconds patience() const {
    return reasons_.patience ? reasons_.patience() : std::chrono::milliseconds(0);
  }

  /// Describes lost ranks, except `rank` of another host: "; ..." or "". Any thread.
  std::string others(int rank = -1) const {
    std::map<int, std::string> lost = monitor_.lost();
    lost.erase(rank);
    const std::string here = here_ ? here_() : "";
    return all_of(lost) + (here.empty() ? "" : "; " + here);
  }

  /// Describes these ranks by their own reports, otherwise by the text beside each: "; ..." or "".
  /// Any thread.
  std::string all_of(const std::map<int, std::string>& lost) const {
    constexpr int kMostNamed = 4;
    std::string text;
    int named = 0;
    for (const auto& [other, failure] : lost) {
      if (++named > kMostNamed) break;
      const std::string told = reasons_.of(other, std::chrono::milliseconds(0));
      text += concat("; ", told.empty() ? failure : told);
    }
    if (named > kMostNamed) text += "; and more have gone";
    return text;
  }

 private:
  const AbortReasons& reasons_;
  ConnectionMonitor& monitor_;
  const std::function<std::string()> here_;
};

}  // namespace dreamcomm

// Why a rank of another host has gone, as far as this one can know.
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

/// A rank that aborts the group tells why, before its connections end. One that has learned of
/// a death in another group, or in a message, leaves this group in good order and tells nothing:
/// the cause is whom it lost. INVARIANT: who waits for it is told of that one, too. Its connection
/// to this rank had ended before the other could learn of it and leave, and the moment in which
/// the other is asked is left for word of that to come.
class FailureCause {
 public:
  /// Both must outlive this. `here` says who of this rank's own host has died or given the group
  /// up.
  FailureCause(const AbortReasons& reasons, ConnectionMonitor& monitor,
               std::function<std::string()> here = {})
      : reasons_(reasons), monitor_(monitor), here_(std::move(here)) {}

  /// Of a rank that is waited for, whose connection has ended by `failure`. Takes a moment. Any
  /// thread.
  std::string of(int rank, const std::string& failure) const {
    const std::string told = told_by(rank);
    return told.empty() ? failure + others(rank) : told;
  }

  /// As it says itself, or ""; takes up to a moment. Any thread.
  std::string told_by(int rank, std::chrono::milliseconds moment = AbortReasons::kMoment) const {
    return reasons_.of(rank, moment);
  }

  /// Whether a rank, or any rank, has aborted the group, as far as the store knows now. Any
  /// thread.
  bool has_aborted(int rank) const {
    return !reasons_.of(rank, std::chrono::milliseconds(0)).empty();
  }

  bool has_any_aborted() const { return reasons_.any(); }

  /// For an answer to one of these questions.
  std::chrono::milliseconds patience() const {
    return reasons_.patience ? reasons_.patience() : std::chrono::milliseconds(0);
  }

  /// Of ranks that have gone, but for `rank` of another host: "; ..." or "". Any thread.
  std::string others(int rank = -1) const {
    std::map<int, std::string> lost = monitor_.lost();
    lost.erase(rank);
    const std::string here = here_ ? here_() : "";
    return all_of(lost) + (here.empty() ? "" : "; " + here);
  }

  /// Of these ranks, as they have told, else as is said beside each: "; ..." or "". Any thread.
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

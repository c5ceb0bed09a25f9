// Why ranks of a group that spans hosts have given it up, or are gone.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "core/error.h"

namespace dreamcomm {

/// How ranks of different hosts learn of each other's ends.
struct AbortReasons {
  /// In a sentence that names `rank`: this one, or one of its host that cannot tell itself. The
  /// last one counts. May be null.
  std::function<void(int rank, const std::string& words)> tell{};
  /// What has been told of a rank so far, for which it has a moment, or ""; may be null.
  std::function<std::string(int rank, std::chrono::milliseconds moment)> told{};
  /// What has been told last of any rank, or "": one look instead of one for each. May be null.
  std::function<std::string()> told_last{};
  /// How long the store may take for an answer to one look. May be null.
  std::function<std::chrono::milliseconds()> patience{};

  /// Of this rank, which aborts the group.
  void give_up(int rank, const std::string& reason) const {
    if (tell) tell(rank, concat("rank ", rank, " has aborted the group: ", reason));
  }
  std::string last() const { return told_last ? told_last() : ""; }
  bool any() const { return !told_last || !last().empty(); }
  static constexpr std::chrono::milliseconds kMoment{160};
  std::string of(int rank, std::chrono::milliseconds moment = kMoment) const {
    return told ? told(rank, moment) : "";
  }
};

}  // namespace dreamcomm

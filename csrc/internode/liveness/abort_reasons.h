// Why ranks of a multi-node group have aborted it, or are lost.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "core/error.h"

namespace dreamcomm {

/// How ranks of different hosts report why they end.
struct AbortReasons {
  /// Reports, in a sentence that names `rank`: this rank, or a rank of its host that cannot report
  /// itself. The last report counts. May be null.
  std::function<void(int rank, const std::string& words)> tell{};
  /// Returns the report of a rank so far, waiting up to a moment for it, or ""; may be null.
  std::function<std::string(int rank, std::chrono::milliseconds moment)> told{};
  /// Returns the last report of any rank, or "": one query instead of one for each rank. May be
  /// null.
  std::function<std::string()> told_last{};
  /// How long the store may take to answer one query. May be null.
  std::function<std::chrono::milliseconds()> patience{};

  /// Reports that this rank aborts the group.
  void post_abort(int rank, const std::string& reason) const {
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

// Why ranks of a group that spans hosts have given it up.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "core/error.h"

namespace dreamcomm {

/// How ranks of different hosts learn of each other's reasons to give a group up.
struct Reasons {
  /// Of this rank; the last one counts. May be null.
  std::function<void(const std::string& reason)> tell{};
  /// What a rank has told so far, for which it has a moment, or ""; may be null.
  std::function<std::string(int rank, std::chrono::milliseconds moment)> told{};

  static constexpr std::chrono::milliseconds kMoment{160};
  std::string of(int rank, std::chrono::milliseconds moment = kMoment) const {
    const std::string reason = told ? told(rank, moment) : "";
    return reason.empty() ? "" : concat("rank ", rank, " has given the group up: ", reason);
  }
};

}  // namespace dreamcomm

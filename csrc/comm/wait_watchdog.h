// Watches one call's waits: deadline, lost peers, failure, Ctrl-C.
#pragma once

#include <functional>
#include <string>

#include "comm/rank_state.h"
#include "core/request.h"
#include "transport/wait.h"

namespace dreamcomm {

class WaitWatchdog final : public WaitObserver {
 public:
  /// The user is warned of a wait for a peer after a tenth of its timeout, but not before this.
  static constexpr std::chrono::seconds kLeastToWarn{1};

  /// Peers that wait for ranks of other hosts have `excuse` beyond the deadline, and all peers have
  /// `grace`, which no message mentions. `what` names the call; `idle` runs at each check (messages
  /// make progress there); `interrupt` may throw. All three must outlive the watchdog.
  WaitWatchdog(RankState& state, const std::function<std::string()>& what,
               Clock::time_point deadline, const std::function<void()>& idle,
               const std::function<void()>& interrupt, Clock::time_point begin = Clock::now(),
               Clock::duration excuse = {}, Clock::duration grace = {});
  WaitWatchdog(RankState& state, const std::function<std::string()>& what,
               Clock::time_point deadline, const std::function<void()>& idle,
               std::function<void()>&& interrupt) = delete;

  void look(int rank) override;
  /// Ignores other lost ranks: the awaited ones report those.
  void look_at_awaited_only() { awaited_only_ = true; }
  /// `what` names the awaited ranks: the user is warned although the wait is for none of this
  /// group's ranks. `warned`: the user has been, in this call.
  void warn_without_rank(bool& warned) { warned_without_rank_ = &warned; }

 private:
  void warn_if_long(int rank, Clock::time_point now);
  void look_at(int rank, Clock::time_point now);
  int gone_of(int rank, Clock::time_point now) const;
  int awaited_by(int rank, Clock::time_point now) const;
  bool is_late(int rank, Clock::time_point now) const;
  std::string describe_wait(int rank, Clock::time_point now) const;

  RankState& state_;
  const std::function<std::string()>& what_;
  Clock::time_point deadline_;
  Clock::time_point begin_;
  Clock::duration excuse_;
  Clock::duration grace_;
  const std::function<void()>& idle_;
  const std::function<void()>& interrupt_;
  bool awaited_only_ = false;
  bool warned_ = false;
  bool* warned_without_rank_ = nullptr;
  int missed_ = -1;  // a rank that the last check found lost
};

/// True if the process of a peer ends, or has ended, without having left. The kernel cuts its line
/// before it reports the end, and on a busy machine some time before.
bool has_died(const Fabric& fabric, int peer);

/// Describes why nothing more will arrive from `peer`; or "".
std::string fate_of(const Fabric& fabric, int peer);

/// The same, and, if the rank has left, the rank that it had lost.
std::string why_gone(const Fabric& fabric, int peer);

/// Describes why nothing more will arrive from `peer`, and its last action; or "".
std::string describe_end(const RankState& state, int peer);

/// Describes the first other rank that has died or aborted the group, and its last action; or "".
/// Ranks that left cleanly do not count.
std::string describe_lost(const RankState& state);

}  // namespace dreamcomm

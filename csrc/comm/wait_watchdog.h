// The watch over one call's waits: deadline, lost peers, failure, Ctrl-C.
#pragma once

#include <functional>
#include <string>

#include "comm/rank_state.h"
#include "core/request.h"
#include "transport/wait.h"

namespace dreamcomm {

class WaitWatchdog final : public WaitObserver {
 public:
  /// A wait for a peer is told of when it has lasted a tenth of what it may, but not before.
  static constexpr std::chrono::seconds kLeastToWarn{1};

  /// Peers who wait for ranks of other hosts have `excuse` beyond the deadline, and all peers
  /// `grace`, of which nobody is told.
  /// `what` names the call; `idle` runs at each look (messages make progress there);
  /// `interrupt` may throw. All three must outlive the guard.
  WaitWatchdog(RankState& state, const std::function<std::string()>& what,
               Clock::time_point deadline, const std::function<void()>& idle,
               const std::function<void()>& interrupt, Clock::time_point begin = Clock::now(),
               Clock::duration excuse = {}, Clock::duration grace = {});
  WaitWatchdog(RankState& state, const std::function<std::string()>& what,
               Clock::time_point deadline, const std::function<void()>& idle,
               std::function<void()>&& interrupt) = delete;

  void look(int rank) override;
  /// Of other ranks that have gone the awaited ones tell.
  void look_at_awaited_only() { awaited_only_ = true; }
  /// `what` names whom the wait is for: the user is warned though it is for none of these ranks.
  /// `warned`: that it was, in this call.
  void warn_without_rank(bool& warned) { warned_without_rank_ = &warned; }

 private:
  void warn_if_long(int rank, Clock::time_point now);
  void look_at(int rank, Clock::time_point now);
  int gone_of(int rank, Clock::time_point now) const;
  int awaited_by(int rank, Clock::time_point now) const;
  bool is_late(int rank, Clock::time_point now) const;
  std::string words_on_wait(int rank, Clock::time_point now) const;

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
  int missed_ = -1;  // a rank that was seen to be gone at the last look
};

/// What has become of `peer`, from which nothing more will come, in words; or empty.
std::string fate_of(const Fabric& fabric, int peer);

/// The same, with whom a rank that has left had lost.
std::string why_gone(const Fabric& fabric, int peer);

/// Why nothing more will come from `peer`, in words with what it did last, or empty.
std::string words_on_end(const RankState& state, int peer);

/// The first other rank that has died or aborted the group, but for those that left in good
/// order, in words with what it did last; or empty.
std::string words_on_lost(const RankState& state);

}  // namespace dreamcomm

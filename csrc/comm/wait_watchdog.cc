#include "comm/wait_watchdog.h"

#include <algorithm>

namespace dreamcomm {

namespace {

/// Returns the first other rank whose process has ended without leaving the group, or -1.
int ended_among(const Fabric& fabric) {
  for (int rank = 0; rank < fabric.size(); ++rank) {
    if (rank != fabric.rank() && has_died(fabric, rank)) return rank;
  }
  return -1;
}

/// The reason that a rank gives for aborting the group, or "".
std::string why_failed(const Fabric& fabric, int peer) {
  const Header& header = fabric.header(peer);
  if (static_cast<Status>(header.status.read()) != Status::kFailed) return "";
  return concat("rank ", fabric.number(peer), " has aborted the group: ", header.reason.data());
}

/// Longer than nearly every wait: only then more than the awaited rank is checked.
constexpr std::chrono::milliseconds kLong{100};

}  // namespace

WaitWatchdog::WaitWatchdog(RankState& state, const std::function<std::string()>& what,
                           Clock::time_point deadline, const std::function<void()>& idle,
                           const std::function<void()>& interrupt, Clock::time_point begin,
                           Clock::duration excuse, Clock::duration grace)
    : state_(state),
      what_(what),
      deadline_(deadline),
      begin_(begin),
      excuse_(excuse),
      grace_(grace),
      idle_(idle),
      interrupt_(interrupt) {}

/// The line is looked at first: a rank that leaves says so, and hangs up then.
bool has_died(const Fabric& fabric, int peer) {
  return fabric.peer(peer) == PeerState::kGone &&
         static_cast<Status>(fabric.header(peer).status.read()) == Status::kActive;
}

std::string fate_of(const Fabric& fabric, int peer) {
  const bool gone = has_died(fabric, peer);
  switch (static_cast<Status>(fabric.header(peer).status.read())) {
    case Status::kFailed:
      return why_failed(fabric, peer);
    case Status::kLeft:
      return concat("rank ", fabric.number(peer),
                    " has left the group (destroyed it or shut it down)");
    case Status::kActive:
      break;
  }
  return gone ? concat("the process of rank ", fabric.number(peer), " has ended") : "";
}

std::string why_gone(const Fabric& fabric, int peer) {
  const std::string fate = fate_of(fabric, peer);
  if (static_cast<Status>(fabric.header(peer).status.read()) != Status::kLeft) return fate;
  // A rank that learns of a death in another group or in a message leaves this group cleanly: the
  // cause is the rank that it lost.
  const int ended = ended_among(fabric);
  if (ended < 0) return fate;
  return concat("the process of rank ", fabric.number(ended), " has ended, and ", fate);
}

std::string describe_end(const RankState& state, int peer) {
  const std::string gone = why_gone(state.fabric(), peer);
  if (gone.empty()) return "";
  return concat(gone, "; rank ", state.fabric().number(peer), ' ', state.last_act(peer));
}

std::string describe_lost(const RankState& state) {
  const Fabric& fabric = state.fabric();
  for (int rank = 0; rank < fabric.size(); ++rank) {
    if (rank == fabric.rank()) continue;
    if (static_cast<Status>(fabric.header(rank).status.read()) == Status::kLeft) continue;
    const std::string words = describe_end(state, rank);
    if (!words.empty()) return words;
  }
  return "";
}

void WaitWatchdog::look(int rank) {
  if (idle_) idle_();
  if (interrupt_) interrupt_();
  if (state_.failed()) {
    throw Error(ErrorKind::kAborted,
                concat(what_(), " on ", state_.who(), " was ended: ", *state_.failure()));
  }
  const Clock::time_point now = Clock::now();
  if (rank >= 0) look_at(rank, now);
  if (is_late(rank, now)) {
    const std::string words = describe_wait(rank, now);  // takes a while
    const std::string told = rank < 0 ? "" : why_failed(state_.fabric(), rank);
    if (!told.empty()) {
      throw Error(ErrorKind::kPeerLost,
                  concat(what_(), " on ", state_.who(), " cannot finish: ", told));
    }
    throw Error(ErrorKind::kTimeout,
                concat(what_(), " on ", state_.who(), " reached its timeout after ", words));
  }
  warn_if_long(rank, now);
}

void WaitWatchdog::warn_if_long(int rank, Clock::time_point now) {
  bool& warned = rank < 0 && warned_without_rank_ != nullptr ? *warned_without_rank_ : warned_;
  const bool for_none = rank < 0 && warned_without_rank_ == nullptr;
  const Clock::duration tenth = std::max<Clock::duration>((deadline_ - begin_) / 10, kLeastToWarn);
  // Past the deadline, as after this process was stopped, the error reports everything.
  if (warned || for_none || now - begin_ < tenth || now >= deadline_) return;
  warned = true;
  state_.warn(concat(what_(), " on ", state_.who(), " has come to ", describe_wait(rank, now),
                     rank < 0 ? " of waiting" : "", "; its timeout is after ",
                     in_seconds(deadline_ - begin_)));
}

/// A peer that waits for another host is not the cause. The ranks that wait for that host
/// themselves report first.
bool WaitWatchdog::is_late(int rank, Clock::time_point now) const {
  if (now < later(deadline_, grace_)) return false;
  if (missed_ >= 0) return false;  // a rank was just lost: the next check finds out why
  const Fabric& fabric = state_.fabric();
  const bool away = rank >= 0 && fabric.header(rank).progress.away.read() != 0;
  return !away || now >= later(deadline_, excuse_) || fabric.has_stopped(rank);
}

/// Returns the rank that `rank` waits for in turn, or -1. If `rank` has stopped checking its peers,
/// it is the one to report itself.
int WaitWatchdog::awaited_by(int rank, Clock::time_point now) const {
  constexpr std::chrono::milliseconds kFresh{500};
  const Fabric& fabric = state_.fabric();
  const Progress& progress = fabric.header(rank).progress;
  const auto looked = std::chrono::nanoseconds(to_ns(now) - progress.looked_ns.read());
  const auto next = static_cast<int>(progress.waiting_for.read());
  const bool waits = progress.inside.read() != 0 && looked < kFresh && next >= 0 &&
                     next < fabric.size() && next != fabric.rank();
  return waits && !fabric.has_stopped(rank) ? next : -1;
}

/// "3.0 s of waiting for rank 1, which last called broadcast as call 7, entered 4.1 s ago; its
/// process 42 is stopped"
std::string WaitWatchdog::describe_wait(int rank, Clock::time_point now) const {
  std::string text = in_seconds(now - begin_);
  if (rank < 0) return text;
  const Clock::time_point until = RankState::answer_until(now - begin_);
  const char* joint = " of waiting for rank ";
  int peer = rank;
  for (int hop = 0; peer >= 0 && hop < state_.size(); ++hop) {
    text += concat(joint, state_.fabric().number(peer), ", which ", state_.does(peer, until));
    joint = ", and waits for rank ";
    peer = awaited_by(peer, now);
  }
  return text;
}

/// Returns the awaited rank, or after a while any rank, that has died, left, or aborted the group
/// before or inside of this call; or -1. INVARIANT: wherever a rank waits, and for whichever rank,
/// that is reported within a second. A lost rank that had returned from this call has done its
/// part.
int WaitWatchdog::gone_of(int rank, Clock::time_point now) const {
  const Fabric& fabric = state_.fabric();
  if (!why_gone(fabric, rank).empty()) return rank;
  if (awaited_only_ || now - begin_ < kLong) return -1;
  const std::int64_t call = state_.header().progress.sequence.read();
  for (int peer = 0; peer < fabric.size(); ++peer) {
    if (peer == fabric.rank()) continue;
    if (why_gone(fabric, peer).empty())
      continue;  // checked before its progress, which is final then
    const Progress& last = fabric.header(peer).progress;
    const bool returned =
        last.sequence.read() >= call && last.inside.read() == 0 && last.failed_in.read() < call;
    if (!returned) return peer;
  }
  return -1;
}

// A rank may publish what we wait for and leave at once. So the first sight of its absence only
// makes us check the flags once more. The wait calls `look` again only if the flags still lack it,
// and then nothing more can arrive.
void WaitWatchdog::look_at(int rank, Clock::time_point now) {
  Progress& progress = state_.header().progress;
  progress.waiting_for.set(rank);
  progress.looked_ns.set(to_ns(now));
  const int gone = gone_of(rank, now);
  if (gone >= 0 && gone == missed_) {
    throw Error(ErrorKind::kPeerLost, concat(what_(), " on ", state_.who(),
                                             " cannot finish: ", describe_end(state_, gone)));
  }
  missed_ = gone;
}

}  // namespace dreamcomm

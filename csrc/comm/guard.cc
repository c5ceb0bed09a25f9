#include "comm/guard.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace dreamcomm {
namespace {

std::string in_seconds(Clock::duration time) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << std::chrono::duration<double>(time).count() << " s";
  return text.str();
}

/// The first other rank whose process has ended without a word to the group, or -1.
int ended_among(const Fabric& fabric) {
  for (int rank = 0; rank < fabric.size(); ++rank) {
    if (rank == fabric.rank()) continue;
    const auto status = static_cast<Status>(fabric.header(rank).status.read());
    if (status == Status::kActive && fabric.peer(rank) == PeerState::kGone) return rank;
  }
  return -1;
}

}  // namespace

Guard::Guard(Member& member, const std::function<std::string()>& what, Clock::time_point deadline,
             const std::function<void()>& idle, const std::function<void()>& interrupt,
             Clock::time_point begin, Clock::duration excuse)
    : member_(member),
      what_(what),
      deadline_(deadline),
      begin_(begin),
      excuse_(excuse),
      idle_(idle),
      interrupt_(interrupt) {}

std::string why_gone(const Fabric& fabric, int peer) {
  const Header& header = fabric.header(peer);
  switch (static_cast<Status>(header.status.read())) {
    case Status::kFailed:
      return concat("rank ", fabric.number(peer),
                    " has given the group up: ", header.reason.data());
    case Status::kLeft: {
      // A rank that learns of a death in another group or in a message leaves this one in good
      // order: the cause is whom it lost.
      const int ended = ended_among(fabric);
      return concat(
          ended < 0 ? "" : concat("the process of rank ", fabric.number(ended), " has ended, and "),
          "rank ", fabric.number(peer), " has left the group (destroyed it or shut it down)");
    }
    case Status::kActive:
      break;
  }
  if (fabric.peer(peer) == PeerState::kGone) {
    return concat("the process of rank ", fabric.number(peer), " has ended");
  }
  return "";
}

void Guard::look(int rank) {
  if (idle_) idle_();
  if (interrupt_) interrupt_();
  if (member_.failed()) {
    throw Error(ErrorKind::kAborted,
                concat(what_(), " on ", member_.who(), " was ended: ", *member_.failure()));
  }
  if (rank >= 0) look_at(rank);
  const Clock::time_point now = Clock::now();
  if (is_late(rank, now)) {
    throw Error(ErrorKind::kTimeout,
                concat(what_(), " on ", member_.who(), " reached its timeout after ",
                       words_on_wait(rank, now)));
  }
  const Clock::duration tenth = std::max<Clock::duration>((deadline_ - begin_) / 10, kLeastToWarn);
  if (warned_ || rank < 0 || now - begin_ < tenth) return;
  warned_ = true;
  member_.warn(concat(what_(), " on ", member_.who(), " has come to ", words_on_wait(rank, now),
                      "; its timeout is after ", in_seconds(deadline_ - begin_)));
}

/// A peer that waits for another host is not to blame, while whoever is speaks first: the ranks
/// that wait for that one itself.
bool Guard::is_late(int rank, Clock::time_point now) const {
  if (now < deadline_) return false;
  if (rank >= 0 && rank == missed_) return false;  // has just gone: the next look tells why
  const Fabric& fabric = member_.fabric();
  const bool away = rank >= 0 && fabric.header(rank).progress.away.read() != 0;
  return !away || now >= deadline_ + excuse_ || fabric.has_stopped(rank);
}

/// "3.0 s of waiting for rank 1, which last called broadcast as call 7, entered 4.1 s ago; its
/// process 42 is stopped"
std::string Guard::words_on_wait(int rank, Clock::time_point now) const {
  const std::string waited = in_seconds(now - begin_);
  if (rank < 0) return waited;
  return concat(waited, " of waiting for rank ", member_.fabric().number(rank), ", which ",
                member_.does(rank, Member::answer_until(now - begin_)));
}

// A rank may publish what we wait for and leave at once. So the first sight of
// its absence only makes us look at the flags once more: the wait calls `look`
// again only if they still lack it, and then nothing can come any more.
void Guard::look_at(int rank) {
  member_.header().progress.waiting_for.set(rank);
  const std::string gone = why_gone(member_.fabric(), rank);
  if (gone.empty()) {
    missed_ = -1;
  } else if (missed_ != rank) {
    missed_ = rank;
  } else {
    throw Error(ErrorKind::kPeerLost,
                concat(what_(), " on ", member_.who(), " cannot finish: ", gone, "; rank ",
                       member_.fabric().number(rank), ' ', member_.last_act(rank)));
  }
}

}  // namespace dreamcomm

// The timeouts of messages between hosts, and any-source receives with no sender left.
#include <algorithm>

#include "comm/wait_watchdog.h"
#include "core/signals.h"
#include "internode/p2p/tag_matching.h"

namespace dreamcomm {
namespace {

constexpr std::chrono::milliseconds kSpare{100};  // in addition to a query of the store

}  // namespace

/// The user is warned as for a wait within a host.
Clock::time_point InternodeTagMatcher::Message::warns_at() const {
  if (warned) return Clock::time_point::max();
  return begin + std::max<Clock::duration>((deadline - begin) / 10, WaitWatchdog::kLeastToWarn);
}

/// Wakes the timeouts thread in time for a message's first warning, and so for its deadline.
void InternodeTagMatcher::watch(Clock::time_point deadline) {
  const Clock::time_point now = Clock::now();
  deadline = std::min(
      deadline, now + std::max<Clock::duration>((deadline - now) / 10, WaitWatchdog::kLeastToWarn));
  if (asks_at_ == Clock::time_point::max()) asks_at_ = now + AbortedPeers::kBetween;
  deadline = std::min(deadline, asks_at_);
  if (deadline >= watched_) return;
  watched_ = deadline;
  start_timeouts();
  changed_.notify_all();
}

void InternodeTagMatcher::start_timeouts() {
  if (!timeouts_.joinable()) timeouts_ = std::thread([this] { work(); });
}

Clock::time_point InternodeTagMatcher::next_deadline() const {
  Clock::time_point next = asks_at_;
  for (const MessagePtr& m : wanted_) {
    if (m->rank) next = std::min({next, m->deadline, m->warns_at()});
  }
  for (const MessagePtr& m : under_way_) next = std::min({next, m->deadline, m->warns_at()});
  return next;
}

void InternodeTagMatcher::work() {
  block_signals();
  Lock lock(mutex_);
  while (!ending_) {
    if (drop_hopeless(lock)) {
      settle(lock);
      lock.lock();
      continue;
    }
    watched_ = next_deadline();
    if (watched_ == Clock::time_point::max()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, watched_);
    }
    const Clock::time_point now = Clock::now();
    if (now >= asks_at_) ask(lock, now);
    const std::optional<std::string> broken = expire(now);
    const std::vector<std::string> texts = broken ? std::vector<std::string>() : warnings(now);
    settle(lock);
    if (broken) options_.broken(*broken);
    for (const std::string& text : texts) options_.warn(text);
    lock.lock();
  }
}

/// Returns ranks of other hosts for which messages have waited a while; none if a deadline is near.
std::vector<int> InternodeTagMatcher::awaited(Clock::time_point now) const {
  const Clock::time_point look_ends = later(now, aborted_peers_.longest() + kSpare);
  const auto ends = [look_ends](const MessagePtr& m) { return m->deadline < look_ends; };
  if (std::any_of(wanted_.begin(), wanted_.end(), ends)) return {};
  if (std::any_of(under_way_.begin(), under_way_.end(), ends)) return {};
  std::set<int> found;
  const auto look = [&](const Message& m) {
    if (!m.waits_for_peer() || now - m.begin < AbortedPeers::kBetween) return;
    for (int rank = 0; rank < topology_.size(); ++rank) {
      const bool may_be =
          m.rank ? *m.rank == rank : topology_.host_of(rank) != topology_.host_of(rank_);
      if (may_be && lost_.count(rank) == 0) found.insert(rank);
    }
  };
  for (const MessagePtr& m : wanted_) look(*m);
  for (const MessagePtr& m : under_way_) look(*m);
  return {found.begin(), found.end()};
}

/// Queries which ranks have aborted the group: the lock is released meanwhile.
void InternodeTagMatcher::ask(Lock& lock, Clock::time_point now) {
  const std::vector<int> ranks = awaited(now);
  lock.unlock();
  for (const int rank : aborted_peers_.among(ranks, Clock::time_point::max())) {
    fail_peer(rank, concat("rank ", rank, " has aborted the group"));
  }
  lock.lock();
  const bool any = !wanted_.empty() || !under_way_.empty();
  asks_at_ = any ? Clock::now() + AbortedPeers::kBetween : Clock::time_point::max();
}

void InternodeTagMatcher::be_alone(const std::string& why) {
  const std::scoped_lock lock(mutex_);
  if (std::exchange(why_alone_, why)) return;
  changed_.notify_all();
}

/// Ends receives from any source once no rank is left to send. Returns whether there were any; the
/// lock was released meanwhile.
/// INVARIANT: when a rank of another host is lost, the messages that it sent before it left have
/// been handled. When a rank of this host is seen to be lost, the messages that it sent have been
/// taken. A receive is posted here only if no message was there for it.
bool InternodeTagMatcher::drop_hopeless(Lock& lock) {
  const auto is_hopeless = [this](const MessagePtr& m) {
    const int far = topology_.size() - topology_.ranks_on(topology_.host_of(rank_));
    return !m->rank && !m->completion->taken() && why_alone_ && closed_.empty() &&
           static_cast<int>(lost_.size()) == far;
  };
  if (std::none_of(wanted_.begin(), wanted_.end(), is_hopeless)) return false;
  const std::string here = why_alone_->empty() ? "" : "; " + *why_alone_;
  const std::map<int, std::string> lost = lost_;
  lock.unlock();
  std::string why = here + options_.causes.all_of(lost);  // asking takes a while
  if (!why.empty()) why.front() = ':';
  lock.lock();
  const std::vector<MessagePtr> wanted(wanted_.begin(), wanted_.end());
  for (const MessagePtr& m : wanted) {
    if (!is_hopeless(m) || !m->completion->take()) continue;
    taken_.push_back(m->completion);
    drop(m, ErrorKind::kPeerLost, concat(": no other rank can send it", why));
  }
  return true;
}

/// Describes what a message waits for `who` to do.
std::string InternodeTagMatcher::lacks(const Message& message, const std::string& who) {
  if (message.kind == Kind::kRecv && !message.matched) return concat(who, " has not sent it");
  const bool waits = message.kind == Kind::kSend &&
                     (message.parcel || message.cargo.bytes <= MessageHeader::kInline);
  return concat(who, " has not ", waits ? "received" : "finished moving", " it");
}

std::string InternodeTagMatcher::lacks(const Message& message) {
  return lacks(message, concat("rank ", *message.rank));
}

std::string InternodeTagMatcher::lacks(const Completion& completion) const {
  const std::scoped_lock lock(mutex_);
  const auto is_of = [&](const MessagePtr& m) {
    return m->rank && m->completion.get() == &completion;
  };
  const auto wanted = std::find_if(wanted_.begin(), wanted_.end(), is_of);
  if (wanted != wanted_.end()) return lacks(**wanted, place(*(*wanted)->rank));
  const auto moved = std::find_if(under_way_.begin(), under_way_.end(), is_of);
  return moved == under_way_.end() ? "" : lacks(**moved, place(*(*moved)->rank));
}

/// Returns a warning for each message that is late but not over its deadline, once for each.
std::vector<std::string> InternodeTagMatcher::warnings(Clock::time_point now) {
  std::vector<std::string> texts;
  const auto tell = [&](const MessagePtr& m) {
    if (!m->rank || now < m->warns_at()) return;
    m->warned = true;
    if (!options_.warn) return;
    texts.push_back(concat(words(*m), " has waited ", in_seconds(now - m->begin), ": ", lacks(*m),
                           "; its timeout is after ", in_seconds(m->deadline - m->begin)));
  };
  std::for_each(wanted_.begin(), wanted_.end(), tell);
  std::for_each(under_way_.begin(), under_way_.end(), tell);
  return texts;
}

/// Withdraws a late receive that nothing has matched. A message that the peer knows of cannot be
/// withdrawn: then the group is unusable, and the reason is returned.
std::optional<std::string> InternodeTagMatcher::expire(Clock::time_point now) {
  const auto is_late = [&](const Message& m) { return now >= m.deadline; };
  const std::vector<MessagePtr> wanted(wanted_.begin(), wanted_.end());
  for (const MessagePtr& m : wanted) {
    if (!m->rank || !is_late(*m)) continue;  // this host's tag matcher handles those of any source
    drop(m, ErrorKind::kTimeout, concat(" reached its timeout: ", lacks(*m)));
  }
  const auto late = std::find_if(under_way_.begin(), under_way_.end(),
                                 [&](const MessagePtr& m) { return is_late(*m); });
  if (late == under_way_.end()) return std::nullopt;
  const MessagePtr message = *late;
  const std::string why = concat(" reached its timeout: ", lacks(*message));
  const std::string reason = concat(words(*message), why);
  drop(message, ErrorKind::kTimeout, why);
  drop_all(ErrorKind::kTimeout, reason);
  return reason;
}

}  // namespace dreamcomm

// Late messages: the user is warned after a tenth of their timeout, and they end with it.
#include <algorithm>
#include <span>

#include "comm/p2p/tag_matching.h"
#include "comm/wait_watchdog.h"

namespace dreamcomm {

/// "recv from rank 1 (8 bytes, tag 0) on rank 0 of 2 in group 'default' `has waited`: rank 1 has
/// not sent it; it last called barrier as call 3, entered 4.1 s ago"
std::string TagMatcher::describe_wait(const Wait& wait, const std::string& has_waited,
                                      Clock::time_point until) const {
  return concat(wait.what, any_or(wait.peer), " (", wait.bytes, " bytes, tag ", wait.tag, ") on ",
                state_.who(), ' ', has_waited, ": ", lacks(wait, until));
}

std::string TagMatcher::lacks(const Wait& wait, Clock::time_point until) const {
  if (wait.peer < 0) return "no rank has sent one";
  return concat("rank ", number(wait.peer), " has not ", wait.lacks, "; it ",
                state_.does(wait.peer, until));
}

std::string TagMatcher::lacks(const Completion& completion, Clock::time_point until) {
  std::optional<Wait> found;
  Lock lock(mutex_);
  each_waiting([&](std::int64_t&, int peer, const auto& messages, const char* lacks) {
    for (const auto& message : messages) {
      if (message.completion.get() == &completion) found = wait_of(peer, message, lacks);
    }
  });
  lock.unlock();  // asking the peer takes a while
  return found ? lacks(*found, until) : "";
}

template <typename Message>
std::exception_ptr TagMatcher::late(const char* lacks, int peer, const Message& message,
                                    Clock::time_point until) const {
  const std::string words =
      describe_wait(wait_of(peer, message, lacks), "reached its timeout", until);
  return std::make_exception_ptr(Error(ErrorKind::kTimeout, words));
}

template <typename Message>
TagMatcher::Wait TagMatcher::wait_of(int peer, const Message& message, const char* lacks) {
  const bool sends = Message::kKind == Kind::kSend;
  return {.what = sends ? "send to " : "recv from ",
          .lacks = lacks,
          .peer = peer,
          .tag = message.tag,
          .bytes = message.data.bytes,
          .asked_ns = message.asked_ns,
          .deadline = message.deadline};
}

/// Returns the messages that have lasted a tenth of their timeout: one at a time for each peer, and
/// none that was issued before the last warning.
std::vector<TagMatcher::Wait> TagMatcher::lasting(Clock::time_point now) {
  std::vector<Wait> found;
  each_waiting([&](std::int64_t& warned_ns, int peer, const auto& messages, const char* lacks) {
    for (const auto& message : messages) {
      const Wait wait = wait_of(peer, message, lacks);
      const Clock::time_point asked{std::chrono::nanoseconds(wait.asked_ns)};
      const Clock::duration tenth =
          std::max<Clock::duration>((wait.deadline - asked) / 10, WaitWatchdog::kLeastToWarn);
      if (wait.asked_ns <= warned_ns || now - asked < tenth) continue;
      warned_ns = to_ns(now);
      found.push_back(wait);
    }
  });
  return found;
}

/// Calls look(time of the last warning, the peer or -1, messages, what the peer has not done).
template <typename Visit>
void TagMatcher::each_waiting(Visit&& look) {
  for (const Receiving& receive : posted_) {
    if (receive.completion->taken()) continue;  // by a message of another host
    const int peer = receive.peer.value_or(-1);
    std::int64_t& warned_ns = peer < 0 ? warned_of_any_ns_ : link(peer).warned_of_receives_ns;
    look(warned_ns, peer, std::span(&receive, 1), "sent it");
  }
  for (int peer = 0; peer < state_.size(); ++peer) {
    Link& with = link(peer);
    look(with.warned_of_sends_ns, peer, with.outgoing, "finished receiving it");
    look(with.warned_of_sends_ns, peer, with.announced, "received it");
    look(with.warned_of_sends_ns, peer, with.unannounced, "taken the messages before it");
    look(with.warned_of_receives_ns, peer, with.incoming, "finished sending it");
  }
}

/// Call it outside the lock: it asks the peer, which takes a while.
void TagMatcher::warn_of(const Wait& wait, Clock::time_point now) const {
  const Clock::time_point asked{std::chrono::nanoseconds(wait.asked_ns)};
  const std::string lasted = concat("has come to ", in_seconds(now - asked), " of waiting");
  state_.warn(concat(describe_wait(wait, lasted, RankState::answer_until(now - asked)),
                     "; its timeout is after ", in_seconds(wait.deadline - asked)));
}

/// Fails every message past its deadline. A receive that nothing has matched is simply withdrawn. A
/// message that the peer knows of cannot be: then the group is broken.
void TagMatcher::expire(Clock::time_point now, std::optional<std::string>& broken) {
  const auto is_late = [&](const auto& message) { return now >= message.deadline; };
  std::optional<Clock::time_point>
      until;  // peers may answer: once for all, because the lock is held
  const auto until_since = [&](std::int64_t asked_ns) {
    if (!until) until = RankState::answer_until(std::chrono::nanoseconds(to_ns(now) - asked_ns));
    return *until;
  };
  const auto until_of = [&](const auto& message) { return until_since(message.asked_ns); };
  const auto until_of_oldest = [&] {
    return until_since(state_.header().correspondence.since_ns.read());
  };
  std::erase_if(posted_, [&](Receiving& r) {
    if (!is_late(r)) return false;
    if (!r.take()) return true;
    drop(r.peer.value_or(-1), r, late("sent it", r.peer.value_or(-1), r, until_of(r)));
    return true;
  });
  for (int peer = 0; peer < state_.size(); ++peer) {
    Link& with = link(peer);
    std::erase_if(with.unannounced, [&](Sending& s) {
      if (!is_late(s)) return false;
      drop(peer, s, late("taken the messages before it", peer, s, until_of(s)));
      return true;
    });
    const auto any_late = [&](const auto& messages) {
      return std::any_of(messages.begin(), messages.end(), is_late);
    };
    const char* const lacks = any_late(with.announced)  ? "received"
                              : any_late(with.outgoing) ? "finished receiving"
                              : any_late(with.incoming) ? "finished sending"
                                                        : nullptr;
    if (lacks != nullptr) {
      broken = concat("a message between rank ", number(state_.rank()), " and rank ", number(peer),
                      " timed out: rank ", number(peer), " has not ", lacks, " it; it ",
                      state_.does(peer, until_of_oldest()));
    }
  }
}

}  // namespace dreamcomm

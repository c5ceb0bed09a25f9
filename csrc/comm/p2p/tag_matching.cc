#include "comm/p2p/tag_matching.h"

#include <algorithm>
#include <cstring>

#include "comm/wait_watchdog.h"

namespace dreamcomm {
namespace {

/// Lists the first reasons, and how many there are beyond.
std::string listed(const std::vector<std::string>& reasons) {
  constexpr std::size_t kMost = 4;
  std::string text = reasons.empty() ? "" : reasons[0];
  for (std::size_t i = 1; i < std::min(kMost, reasons.size()); ++i) text += "; " + reasons[i];
  return reasons.size() <= kMost ? text : concat(text, "; and ", reasons.size() - kMost, " more");
}

}  // namespace

TagMatcher::TagMatcher(RankState& state, Recorder& recorder)
    : state_(state), recorder_(recorder), links_(static_cast<std::size_t>(state.size())) {}

std::shared_ptr<Completion> TagMatcher::send(Block data, int peer, std::uint64_t tag,
                                             Clock::time_point deadline) {
  auto completion = std::make_shared<Completion>();
  Lock lock(mutex_);
  tally(Kind::kSend).calls.grow(1);
  Link& to = link(peer);
  to.unannounced.push_back(Sending{data, tag, to.numbers++, deadline, completion, 0, now_ns()});
  pump(peer, lock);
  settle(lock, /*changed=*/true, completion.get());
  return completion;
}

std::shared_ptr<Completion> TagMatcher::receive(Block data, std::optional<int> peer,
                                                std::uint64_t tag, Clock::time_point deadline) {
  auto completion = std::make_shared<Completion>();
  Lock lock(mutex_);
  tally(Kind::kRecv).calls.grow(1);
  Receiving receiving{data, peer, tag, 0, deadline, completion, 0, now_ns()};
  if (!match(receiving)) posted_.push_back(std::move(receiving));
  for (int other = 0; other < state_.size(); ++other) {
    if (other != state_.rank() && (!peer || *peer == other)) pump(other, lock);
  }
  settle(lock, /*changed=*/true, completion.get());
  return completion;
}

void TagMatcher::withdraw(const Completion& completion) {
  Lock lock(mutex_);
  std::erase_if(posted_, [&](const Receiving& r) { return r.completion.get() == &completion; });
  settle(lock);
}

void TagMatcher::cancel(const Completion& completion) {
  Lock lock(mutex_);
  std::erase_if(posted_, [&](Receiving& r) {
    if (r.completion.get() != &completion || !r.take()) return false;
    const int peer = r.peer.value_or(-1);
    drop(peer, r,
         std::make_exception_ptr(
             Error(ErrorKind::kInterrupted,
                   concat("recv from ", any_or(peer), " with tag ", r.tag, " on ", state_.who(),
                          " was interrupted before a message came, and takes none any more"))));
    return true;
  });
  settle(lock);
}

/// Gives the receive the earliest arrived message that fits, if there is one.
bool TagMatcher::match(Receiving& receiving) {
  int best = -1;
  std::deque<Unexpected>::iterator found;
  for (int peer = 0; peer < state_.size(); ++peer) {
    if (receiving.peer && *receiving.peer != peer) continue;
    auto& arrived = link(peer).arrived;
    const auto it = std::find_if(arrived.begin(), arrived.end(),
                                 [&](const Unexpected& a) { return a.tag == receiving.tag; });
    if (it == arrived.end() || (best >= 0 && it->order > found->order)) continue;
    best = peer;
    found = it;
  }
  if (best < 0 || !receiving.take()) return false;
  Unexpected arrived = std::move(*found);
  link(best).arrived.erase(found);
  accept(best, arrived, receiving);
  return true;
}

/// Joins a message and the receive that it matches.
void TagMatcher::accept(int peer, Unexpected& arrived, Receiving& receiving) {
  const bool fits = arrived.bytes == receiving.data.bytes;
  receiving.number = arrived.number;
  if (!fits) {
    drop(peer, receiving,
         std::make_exception_ptr(
             Error(ErrorKind::kMismatch,
                   concat("recv with tag ", receiving.tag, " on ", state_.who(), " expects ",
                          receiving.data.bytes, " bytes, but rank ", number(peer), " sent ",
                          arrived.bytes, "; give both sides tensors of the same size and dtype"))));
  }
  if (arrived.data) {
    if (!fits) return;
    if (!arrived.data->empty()) {
      std::memcpy(receiving.data.data, arrived.data->data(), arrived.data->size());
    }
    note_moved(peer, receiving);
    finish(std::move(receiving.completion), peer);
    return;
  }
  link(peer).ungranted.push_back(ClearToSend{arrived.number, fits ? 0U : 1U, receiving.data.bytes});
  if (!fits) return;
  receiving.peer = peer;
  link(peer).incoming.push_back(std::move(receiving));
}

void TagMatcher::finish(std::shared_ptr<Completion> completion, int source,
                        std::exception_ptr failure) {
  finished_.push_back({std::move(completion), source, std::move(failure)});
}

/// Finishes the completions outside the lock: their callbacks may call back. No thread waits for a
/// message that its caller has not got yet, so `unseen` alone wakes none.
void TagMatcher::settle(Lock& lock, bool changed, const Completion* unseen) {
  std::vector<Finished> finished = std::exchange(finished_, {});
  if (changed) show_oldest();
  lock.unlock();
  bool seen = false;
  for (Finished& one : finished) {
    one.completion->finish(number(one.source), one.failure);
    seen |= one.completion.get() != unseen;
  }
  if (seen) state_.ring_own();
}

bool TagMatcher::progress() {
  Lock lock(mutex_);
  bool moved = false;
  for (int peer = 0; peer < state_.size(); ++peer) {
    if (peer != state_.rank()) moved |= pump(peer, lock);
  }
  settle(lock, moved);
  return moved;
}

Tally& TagMatcher::tally(Kind kind) const {
  return state_.header().tallies[static_cast<std::size_t>(kind)];
}

/// All bytes of a message have been sent, or received.
template <typename Message>
void TagMatcher::note_moved(int peer, const Message& message) {
  Tally& counts = tally(Message::kKind);
  Gauge& bytes = Message::kKind == Kind::kSend ? counts.sent : counts.received;
  bytes.grow(static_cast<std::int64_t>(message.data.bytes));
  note(peer, message, Record::State::kDone);
}

/// Ends a message that will not be moved.
template <typename Message>
void TagMatcher::drop(int peer, Message& message, std::exception_ptr failure) {
  note(peer, message, Record::State::kFailed);
  finish(std::move(message.completion), peer, std::move(failure));
}

template <typename Message>
void TagMatcher::note(int peer, const Message& message, Record::State state) {
  if (recorder_.idle()) [[likely]]
    return;
  recorder_.note_message({.number = message.number,
                          .bytes = static_cast<std::int64_t>(message.data.bytes),
                          .entered_ns = message.asked_ns,
                          .ended_ns = now_ns(),
                          .peer = peer,
                          .kind = Message::kKind,
                          .state = state});
}

template void TagMatcher::note_moved(int, const Sending&);
template void TagMatcher::note_moved(int, const Receiving&);
template void TagMatcher::drop(int, Sending&, std::exception_ptr);
template void TagMatcher::drop(int, Receiving&, std::exception_ptr);

/// Shows tools the message that has been under way for longest.
void TagMatcher::show_oldest() const {
  Correspondence& shown = state_.header().correspondence;
  std::int64_t pending = 0;
  std::int64_t since = 0;
  const auto look = [&](Kind kind, int peer, const auto& messages) {
    pending += static_cast<std::int64_t>(messages.size());
    if (messages.empty() || (since != 0 && since <= messages.front().asked_ns)) return;
    since = messages.front().asked_ns;
    shown.kind.set(static_cast<std::int64_t>(kind));
    shown.peer.set(peer);
    shown.bytes.set(static_cast<std::int64_t>(messages.front().data.bytes));
    shown.since_ns.set(since);
  };
  if (!posted_.empty()) look(Kind::kRecv, posted_.front().peer.value_or(-1), posted_);
  for (int peer = 0; peer < state_.size(); ++peer) {
    const Link& with = links_[static_cast<std::size_t>(peer)];
    for (const auto* queue : {&with.unannounced, &with.announced, &with.outgoing}) {
      look(Kind::kSend, peer, *queue);
    }
    look(Kind::kRecv, peer, with.incoming);
  }
  shown.pending.set(pending);
}

bool TagMatcher::pending_with(int peer) const {
  const Link& l = links_[static_cast<std::size_t>(peer)];
  return !l.unannounced.empty() || !l.announced.empty() || !l.outgoing.empty() ||
         !l.ungranted.empty() || !l.incoming.empty();
}

bool TagMatcher::busy() const {
  std::scoped_lock lock(mutex_);
  if (!posted_.empty()) return true;
  for (int peer = 0; peer < state_.size(); ++peer) {
    if (pending_with(peer)) return true;
  }
  return false;
}

std::optional<std::string> TagMatcher::why_alone() const {
  std::scoped_lock lock(mutex_);
  return why_alone_;
}

std::optional<std::string> TagMatcher::check_health() {
  progress();
  Lock lock(mutex_);
  const bool any_posted = !posted_.empty();
  int here = 0;
  std::vector<std::string> fates;
  for (int peer = 0; peer < state_.size(); ++peer) {
    if (peer == state_.rank()) continue;
    // INVARIANT: a peer counts as lost only if it was lost before this thread looked for messages
    // that it left, and none is left: a message that it sent in full still counts.
    const bool concerned = any_posted || pending_with(peer);
    const std::string fate = concerned ? fate_of(state_.fabric(), peer) : "";
    if (fate.empty() || left_behind(peer)) {
      ++here;
      continue;
    }
    fates.push_back(fate);
    if (link(peer).filling) continue;  // a thread still uses the message
    fail_link(peer, describe_end(state_, peer));
  }
  why_alone_.reset();
  if (here == 0) why_alone_ = listed(fates);
  if (why_alone_ && !state_.fabric().internode()) {
    drop_from_any(fates.empty() ? "it is the only rank" : *why_alone_);
  }
  std::optional<std::string> broken;
  const Clock::time_point now = Clock::now();
  expire(now, broken);
  const std::vector<Wait> long_ones = lasting(now);
  settle(lock);
  for (const Wait& wait : long_ones) warn_of(wait, now);
  return broken;
}

/// Ends receives from any source, because no rank is left to send.
void TagMatcher::drop_from_any(const std::string& reason) {
  std::erase_if(posted_, [&](Receiving& r) {
    if (r.peer) return false;
    const std::string text = concat("recv from any source with tag ", r.tag, " on ", state_.who(),
                                    ": no other rank can send it: ", reason);
    drop(-1, r, std::make_exception_ptr(Error(ErrorKind::kPeerLost, text)));
    return true;
  });
}

/// Fails every message that waits for a lost peer.
void TagMatcher::fail_link(int peer, const std::string& reason) {
  const auto lost = [&](const char* what, std::uint64_t tag) {
    return std::make_exception_ptr(
        Error(ErrorKind::kPeerLost, concat(what, number(peer), " with tag ", tag, " on ",
                                           state_.who(), " cannot finish: ", reason)));
  };
  Link& with = link(peer);
  for (auto* queue : {&with.unannounced, &with.announced, &with.outgoing}) {
    for (Sending& s : *queue) drop(peer, s, lost("send to rank ", s.tag));
    queue->clear();
  }
  for (Receiving& r : with.incoming) {
    drop(peer, r, lost("recv from rank ", r.tag));
  }
  with.incoming.clear();
  with.ungranted.clear();
  std::erase_if(posted_, [&](Receiving& r) {
    if (r.peer != peer) return false;
    drop(peer, r, lost("recv from rank ", r.tag));
    return true;
  });
}

void TagMatcher::fail_all(ErrorKind kind, const std::string& reason) {
  Lock lock(mutex_);
  const auto failure = [&](const char* what, int peer) {
    return std::make_exception_ptr(
        Error(kind, concat(what, any_or(peer), " on ", state_.who(), " was ended: ", reason)));
  };
  for (int peer = 0; peer < state_.size(); ++peer) {
    Link& with = link(peer);
    for (auto* queue : {&with.unannounced, &with.announced, &with.outgoing}) {
      // A thread that copies right now holds a reference to the front element: that one stays, and
      // ends at the thread's next check.
      const std::size_t kept = queue == &with.outgoing && with.filling ? 1 : 0;
      while (queue->size() > kept) {
        drop(peer, queue->back(), failure("send to ", peer));
        queue->pop_back();
      }
    }
    const std::size_t kept = with.draining ? 1 : 0;
    while (with.incoming.size() > kept) {
      drop(peer, with.incoming.back(), failure("recv from ", peer));
      with.incoming.pop_back();
    }
  }
  for (Receiving& r : std::exchange(posted_, {})) {
    if (r.take()) drop(r.peer.value_or(-1), r, failure("recv from ", r.peer.value_or(-1)));
  }
  settle(lock);
}

}  // namespace dreamcomm

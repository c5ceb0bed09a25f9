// Messages between two ranks, matched by source and tag.
//
// A sender announces each message in its outbox for the receiver, in order. The receiver matches
// announcements with its receives and grants those that match, in any order; the sender then
// streams the granted messages one after another through two buffers. Small messages travel inside
// the announcement. A receiver takes all announcements that it finds, wanted or not, so an unwanted
// message never blocks one behind it.
//
// INVARIANT (each ring of places): the writer fills place i only while i minus the count that the
// reader has published as read is below the number of places, and publishes i + 1 afterwards. The
// reader reads place i only after it saw that, and publishes its own count afterwards. So a place
// is never written and read at once. Envelopes, grants and buffers each follow it.
//
// Any thread may call any function. The lock guards the bookkeeping; bytes of
// granted messages are copied outside it, by the thread that claimed the stream.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "comm/p2p/completion.h"
#include "comm/rank_state.h"
#include "comm/record/recorder.h"
#include "core/flag.h"
#include "core/request.h"

namespace dreamcomm {

class TagMatcher {
 public:
  TagMatcher(RankState& state, Recorder& recorder);

  std::shared_ptr<Completion> send(Block data, int peer, std::uint64_t tag,
                                   Clock::time_point deadline);
  std::shared_ptr<Completion> receive(Block data, std::optional<int> peer, std::uint64_t tag,
                                      Clock::time_point deadline);

  /// Another host's message has claimed this receive from any source.
  void withdraw(const Completion& completion);

  /// Cancels a receive whose waiting thread was interrupted, unless it is matched. Left waiting, it
  /// would take the message that the next receive is for.
  void cancel(const Completion& completion);
  /// "rank 1 has not sent it; it last called ...", or "" if it is not under way here. The peer is
  /// asked, and may answer until then.
  std::string lacks(const Completion& completion, Clock::time_point until);

  /// Moves what can be moved now; returns whether anything was.
  bool progress();
  /// Fails the messages that have timed out or wait for a lost rank. System calls: for threads that
  /// have waited a while. Returns why the group is unusable now, if it is: an announced message
  /// cannot be taken back.
  std::optional<std::string> check_health();
  /// True if messages are under way.
  bool busy() const;
  /// Why the other ranks were lost when health was last checked, if all were.
  std::optional<std::string> why_alone() const;
  /// Fails all messages under way.
  void fail_all(ErrorKind kind, const std::string& reason);

 private:
  struct Sending {
    static constexpr Kind kKind = Kind::kSend;
    Block data;
    std::uint64_t tag = 0;
    std::uint32_t number = 0;
    Clock::time_point deadline;
    std::shared_ptr<Completion> completion;
    std::size_t moved = 0;
    std::int64_t asked_ns = 0;
  };
  struct Receiving {
    static constexpr Kind kKind = Kind::kRecv;
    Block data;
    std::optional<int> peer;
    std::uint64_t tag = 0;
    std::uint32_t number = 0;
    Clock::time_point deadline;
    std::shared_ptr<Completion> completion;
    std::size_t moved = 0;
    std::int64_t asked_ns = 0;

    /// True if no message of another host has claimed it.
    bool take() const { return peer || completion->take(); }
  };
  struct Unexpected {         // announced by a peer, not received yet
    std::uint64_t order = 0;  // among all peers: for receives from any source
    std::uint64_t tag = 0;
    std::uint64_t bytes = 0;
    std::uint32_t number = 0;
    std::optional<std::vector<std::byte>> data;  // of a small message
  };
  struct Link {  // with one peer
    std::deque<Sending> unannounced;
    std::deque<Sending> announced;
    std::deque<Sending> outgoing;  // granted: streamed in this order
    std::deque<Unexpected> arrived;
    std::deque<ClearToSend> ungranted;  // decided, no place free yet
    std::deque<Receiving> incoming;     // granted: arrives in this order
    std::uint32_t numbers = 0;
    bool filling = false;                 // a thread copies into our buffers
    bool draining = false;                // a thread copies out of the peer's
    std::int64_t warned_of_sends_ns = 0;  // when the user was last warned of one
    std::int64_t warned_of_receives_ns = 0;
  };
  struct Wait {  // of a message, for errors and warnings
    const char* what;
    const char* lacks;  // what the peer has not done
    int peer;
    std::uint64_t tag;
    std::size_t bytes;
    std::int64_t asked_ns;
    Clock::time_point deadline;
  };
  struct Finished {
    std::shared_ptr<Completion> completion;
    int source;
    std::exception_ptr failure;
  };
  using Lock = std::unique_lock<std::mutex>;

  /// The number in messages and for callers, which use the group's ranks.
  int number(int peer) const { return peer < 0 ? peer : state_.fabric().number(peer); }
  std::string any_or(int peer) const {
    return peer < 0 ? "any rank" : concat("rank ", number(peer));
  }
  Link& link(int peer) { return links_[static_cast<std::size_t>(peer)]; }
  Outbox& outbox(int owner, int receiver) const;
  Inbox& inbox(int owner, int sender) const;

  bool pump(int peer, Lock& lock);
  bool ready_to_send(int peer);
  bool take_announcements(int peer);
  bool place_grants(int peer);
  bool take_grants(int peer);
  bool fill(int peer, Lock& lock);
  bool drain(int peer, Lock& lock);
  void accept(int peer, Unexpected& arrived, Receiving& receiving);
  bool match(Receiving& receiving);
  void settle(Lock& lock, bool changed = true, const Completion* unseen = nullptr);
  void finish(std::shared_ptr<Completion> completion, int source,
              std::exception_ptr failure = nullptr);

  Tally& tally(Kind kind) const;
  template <typename Message>  // Sending or Receiving
  void note_moved(int peer, const Message& message);
  template <typename Message>
  void drop(int peer, Message& message, std::exception_ptr failure);
  template <typename Message>
  void note(int peer, const Message& message, Record::State state);
  void show_oldest() const;

  bool pending_with(int peer) const;
  bool left_behind(int peer) const;
  void expire(Clock::time_point now, std::optional<std::string>& broken);
  void fail_link(int peer, const std::string& reason);
  void drop_from_any(const std::string& reason);
  template <typename Message>
  std::exception_ptr late(const char* lacks, int peer, const Message& message,
                          Clock::time_point until) const;
  template <typename Message>
  static Wait wait_of(int peer, const Message& message, const char* lacks);
  std::string describe_wait(const Wait& wait, const std::string& has_waited,
                            Clock::time_point until) const;
  std::string lacks(const Wait& wait, Clock::time_point until) const;
  template <typename Visit>
  void each_waiting(Visit&& look);
  std::vector<Wait> lasting(Clock::time_point now);
  void warn_of(const Wait& wait, Clock::time_point now) const;

  RankState& state_;
  Recorder& recorder_;
  mutable std::mutex mutex_;
  std::vector<Link> links_;
  std::deque<Receiving> posted_;
  std::vector<Finished> finished_;  // their completions are finished outside the lock
  std::uint64_t arrivals_ = 0;
  std::int64_t warned_of_any_ns_ = 0;
  std::optional<std::string> why_alone_;
};

}  // namespace dreamcomm

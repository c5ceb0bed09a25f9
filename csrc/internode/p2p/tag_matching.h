// Messages with ranks of other hosts, matched by source and tag like those within a host.
//
// A sender writes a header ahead of each message; small messages travel in the header's packet. The
// bytes of larger ones follow under a tag of their own. They move once the receiver has matched the
// header, and the sender is informed of the match before its part ends. A receive from any source
// is posted here and in the tag matcher of its host, and goes to the first that claims it
// (Completion::take).
//
// INVARIANT: headers between two ranks arrive in the order written, and are matched in that order,
// so messages of one source and tag do not overtake each other.
//
// Any thread may call any function. Completions are finished without the lock.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/p2p/completion.h"
#include "comm/record/recorder.h"
#include "core/error.h"
#include "core/flag.h"
#include "core/request.h"
#include "internode/liveness/aborted_peers.h"
#include "internode/liveness/failure_cause.h"
#include "internode/p2p/peer_channel.h"
#include "transport/link.h"
#include "transport/topology.h"
#include "transport/window.h"

namespace dreamcomm {

class InternodeTagMatcher {
 public:
  struct Options {
    std::string who;  // "rank 0 of 4 in group 'default'"
    const FailureCause& causes;
    /// A receive from any source was claimed here.
    std::function<void(const Completion& completion)> taken{};
    /// Completions are done.
    std::function<void()> finished{};
    /// The group is unusable: a message that a peer knows of cannot be withdrawn.
    std::function<void(const std::string& reason)> broken{};
    /// Warns the user that a message is late.
    std::function<void(const std::string& text)> warn{};
    MultiNodeState& shown;  // shown to tools
    Recorder& recorder;
  };
  InternodeTagMatcher(std::unique_ptr<Link> link, const Topology& topology, int rank,
                      Options options);
  ~InternodeTagMatcher();
  InternodeTagMatcher(const InternodeTagMatcher&) = delete;
  InternodeTagMatcher& operator=(const InternodeTagMatcher&) = delete;

  std::shared_ptr<Completion> send(const Cargo& cargo, int rank, std::uint64_t tag,
                                   Clock::time_point deadline);
  std::shared_ptr<Completion> receive(const Cargo& cargo, int rank, std::uint64_t tag,
                                      Clock::time_point deadline);
  /// Receives from any source. Until a message is taken, the group that created the completion
  /// handles the deadline.
  void receive_any(const Cargo& cargo, std::uint64_t tag, Clock::time_point deadline,
                   std::shared_ptr<Completion> completion);

  /// The other ranks of this host are lost, if there were any, and why. Calls nothing back.
  void be_alone(const std::string& why);
  /// Describes the rank that a message waits for, and for what; "" if it is not one of these
  /// messages.
  std::string lacks(const Completion& completion) const;

  /// Fails all messages under way.
  void fail_all(ErrorKind kind, const std::string& reason);
  /// The same, and makes the threads end.
  void close(const std::string& reason);

 private:
  struct Message {
    Kind kind = Kind::kSend;
    std::optional<int> rank;
    std::uint64_t tag = 0;
    Cargo cargo;
    Clock::time_point deadline = Clock::time_point::max();
    std::shared_ptr<Completion> completion;
    std::uint32_t number = 0;
    bool matched = false;              // a receive has its message
    std::shared_ptr<Parcel> parcel{};  // of a send, until the receiver has taken it
    std::int64_t asked_ns = now_ns();
    Clock::time_point begin = Clock::now();
    bool warned = false;  // the user was warned that it is late
    Clock::time_point warns_at() const;
    /// True if it waits for its peer, and not for bytes that are on their way.
    bool waits_for_peer() const { return kind == Kind::kSend ? parcel != nullptr : !matched; }
  };
  using MessagePtr = std::shared_ptr<Message>;
  struct Unexpected {
    int rank;
    MessageHeader header;
    std::vector<std::byte> bytes;
  };
  struct Finished {
    std::shared_ptr<Completion> completion;
    int rank;
    std::exception_ptr failure;
  };
  using Lock = std::unique_lock<std::mutex>;

  PeerChannel& peer(int rank);
  void listen_to_all();
  std::string place(int rank) const;
  std::string words(const Message& message) const;

  void on_header(int rank, const MessageHeader& header, std::span<const std::byte> bytes);
  void forget_taken();
  void on_report(int rank, const MessageHeader& header);
  bool match(const MessagePtr& message);
  void accept(const MessagePtr& message, const Unexpected& arrived);
  void refuse(const MessagePtr& message, const Unexpected& arrived);
  void move(const MessagePtr& message, std::shared_ptr<Parcel> parcel);
  void end(const MessagePtr& message, std::exception_ptr failure);
  void drop(const MessagePtr& message, ErrorKind kind, const std::string& text);
  void drop_where(const std::function<bool(const Message&)>& concerns, ErrorKind kind,
                  const std::string& why);
  void drop_all(ErrorKind kind, const std::string& reason);
  void fail_peer(int rank, const std::string& reason);
  void settle(Lock& lock);

  Tally& tally(Kind kind) const;
  void note_moved(const Message& message);
  void note(const Message& message, Record::State state);
  void show_oldest() const;

  void watch(Clock::time_point deadline);
  void start_timeouts();
  void work();
  bool drop_hopeless(Lock& lock);
  std::optional<std::string> expire(Clock::time_point now);
  std::vector<std::string> warnings(Clock::time_point now);
  static std::string lacks(const Message& message);
  static std::string lacks(const Message& message, const std::string& who);
  Clock::time_point next_deadline() const;
  std::vector<int> awaited(Clock::time_point now) const;
  void ask(Lock& lock, Clock::time_point now);

  const std::unique_ptr<Link> link_;
  const Topology& topology_;
  const int rank_;
  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, std::unique_ptr<PeerChannel>> peers_;
  std::map<int, std::uint32_t> numbers_;  // of the next message to each rank
  std::map<int, std::string> lost_;       // why nothing is sent to a rank any more
  std::deque<MessagePtr> wanted_;         // receives without a message
  std::deque<Unexpected> unexpected_;     // messages without a receive
  std::list<MessagePtr> under_way_;       // sends, and receives of a message
  std::vector<Finished> finished_;
  std::vector<std::shared_ptr<Completion>> taken_;
  std::string closed_;                                    // why, once it is
  Clock::time_point watched_ = Clock::time_point::max();  // the timeouts thread wakes then
  Clock::time_point asks_at_ = Clock::time_point::max();  // and queries the awaited ranks then
  AbortedPeers aborted_peers_{options_.causes};           // used by the timeouts thread only
  std::optional<std::string> why_alone_;                  // on this host
  bool ending_ = false;
  std::thread timeouts_;  // message_timeouts.cc; runs once a message needs it
};

}  // namespace dreamcomm

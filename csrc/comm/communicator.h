// One rank's membership in a group: runs requests and messages, counts bytes.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/record.h"
#include "core/request.h"

namespace dreamcomm {

struct Costs;           // algorithms/cost/costs.h: what algorithms are chosen by
class Fabric;           // transport/fabric.h: the windows of all ranks
class Heap;             // transport/shm/heap.h: memory that peers map
class Completion;       // comm/p2p/completion.h: a message under way
class Recorder;         // comm/record/recorder.h: what is noted of operations
struct MultiNodeState;  // transport/window.h: what a rank shows of a group on several hosts
class RemoteBarrier;    // comm/barrier/remote_barrier.h: a monitored barrier on other hosts

/// The name of a program's first group, which messages need not tell.
inline constexpr const char* kDefaultGroup = "default";

struct CommOptions {
  std::string group = kDefaultGroup;  // its name in messages
  std::string algorithm = "auto";     // or a row's name: direct, ring, master, ...
  bool fixed_order = true;            // reductions in rank order only
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  /// Says where in the program this thread makes its call, as " at file:line", or "". Asked
  /// only when something has gone wrong.
  std::function<std::string()> call_site{};
  /// Tells the user what may become an error: that a peer is late. Any thread.
  std::function<void(const std::string&)> warn{};
  /// The ranks of its members in the job, for what is recorded; empty: the same.
  std::vector<int> world_ranks{};
  /// Of a host's part: those of the whole group, as messages name it.
  std::vector<int> world_ranks_of_whole{};
};

/// Bytes this rank handed to and took from its peers in one kind of operation.
struct Traffic {
  std::uint64_t calls = 0;
  std::uint64_t sent = 0;      // bytes of this rank that peers read, counted per reader
  std::uint64_t received = 0;  // bytes this rank read from peers
  std::uint64_t in_place = 0;  // of the calls, those on tensors in heaps, without a copy
};

/// What the cost model expects of a call.
struct Prediction {
  std::string algorithm;
  double seconds = 0;
};

/// Called by a thread that has waited a while; throws to end the wait.
using Interrupt = std::function<void()>;

class Communicator {
 public:
  Communicator(std::unique_ptr<Fabric> fabric, CommOptions options);
  ~Communicator();  // leaves the group
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const;

  /// Agrees with all ranks on the costs that algorithms are chosen by: those that
  /// rank 0 knows, or, if it knows none, measured here in under a second. Collective,
  /// before any other call; without it the fixed ones serve. `heap` is this rank's.
  /// Says whether the costs hold for other groups, too: heaps were not too full to be
  /// measured. Waits until `deadline`, by default for the group's timeout, 10 s at the least.
  /// Throws Error, after which the group is unusable.
  bool tune(const std::optional<Costs>& known, Heap* heap, const Interrupt& interrupt = {},
            std::optional<Clock::time_point> deadline = std::nullopt);
  bool all_have_heaps() const;
  const Costs& costs() const;

  /// Runs the collective on the calling thread, after those called before it.
  /// Throws Error; every kind but kInvalid and kMismatch ends the group.
  void run(const Request& request, const Interrupt& interrupt = {});

  /// Runs `job` on the group's progress thread after everything called before.
  /// The job calls `run_ordered` for its requests and must not throw.
  void submit(std::function<void()> job);
  /// Runs `job` on the calling thread after everything called before.
  void run_in_turn(const std::function<void()>& job, const Interrupt& interrupt = {});
  /// Only inside a job of submit or run_in_turn.
  void run_ordered(const Request& request, const Interrupt& interrupt = {});

  /// Messages: matched by (source, tag) in the order sent. `peer` is the other
  /// rank, or for a receive nothing, which takes from any source. The memory
  /// must stay valid until the ticket is done. Progress needs no further call.
  std::shared_ptr<Completion> send(Block data, int peer, std::uint64_t tag,
                                   Clock::time_point deadline);
  std::shared_ptr<Completion> receive(Block data, std::optional<int> peer, std::uint64_t tag,
                                      Clock::time_point deadline);
  /// Of a receive from any source that has got a message of another host.
  void withdraw(const Completion& completion);
  /// Nobody waits for this receive any more: it ends, unless its message has come.
  void give_up(const Completion& completion);
  /// A ticket is done that this communicator has not finished: wakes who waits for it.
  void ring();
  /// Waits for a ticket, helping it along; throws what it failed with.
  void wait(Completion& completion, const Interrupt& interrupt = {});

  /// Waits in a job by `wait()`, which returns whether its wait is over, or false now and then:
  /// with the deadline, the failures and the deaths of a wait for peers, who may leave in good
  /// order meanwhile. `what` names the call and what it waits for.
  struct LongWait {
    Clock::time_point deadline;
    Clock::duration grace;  // beyond it, of which nobody is told
    bool& warned;           // whether the user has been, in this call
  };
  void wait_through(const std::function<bool()>& wait, const std::function<std::string()>& what,
                    const LongWait& terms, const Interrupt& interrupt = {});
  /// Tells the user what may become an error. Any thread.
  void warn(const std::string& text) const;

  /// Waits until all ranks called it, without touching the collectives' order:
  /// the group stays usable when it fails. Rank 0 names the missing ranks: the
  /// first, or with `all` every one; the others learn from rank 0. `issued`: collectives of this
  /// rank so far; by default those that have begun. `elsewhere`: of rank 0, where the group has
  /// other hosts.
  void monitored_barrier(std::chrono::milliseconds timeout, bool all,
                         const Interrupt& interrupt = {},
                         std::optional<std::int64_t> issued = std::nullopt,
                         RemoteBarrier* remote = nullptr);

  /// Fails all waiting and later calls with `reason`; peers are told. Any thread.
  void abort(const std::string& reason);
  /// Ends the progress thread and leaves the group; waits for submitted jobs
  /// unless aborted. Later calls fail. Idempotent, any thread.
  void shutdown();
  /// Throws Error(kAborted) if the group is unusable.
  void check_usable(const char* operation) const;
  /// "rank 1 of 4 in group 'default'".
  std::string who() const;
  /// Why the group is unusable, or nothing.
  std::optional<std::string> failure() const;
  std::optional<ErrorKind> failure_kind() const;  // none after a shutdown, too

  /// Whether the process of a rank is known to have ended, also after the group has failed;
  /// false once this rank has left it. A system call.
  bool has_ended(int rank) const;

  /// Who has died, or aborted the group, and what it did last; or empty. System calls.
  std::string lost() const;
  /// That rank, if it has, or has left; or empty.
  std::string lost(int rank) const;
  /// Whether all ranks have entered the call that this rank is in.
  bool all_have_come() const;
  /// "rank 1, which last called ...", whom this rank's call waits for, or "". That rank is asked,
  /// for a part of what the wait has lasted.
  std::string awaited(Clock::duration waited) const;
  /// The same of a message: "rank 1 has not sent it; it last called ...".
  std::string awaited(const Completion& completion, Clock::duration waited) const;
  /// Of the messages that are not this communicator's.
  struct FarMessages {
    std::function<std::string(const Completion& completion)> lacks{};  // what is said there of one
    /// Told, again and again, why once all other ranks here have gone.
    std::function<void(const std::string& why)> alone{};
  };
  /// Returns once nobody uses those before any more.
  void set_far_messages(FarMessages messages);
  /// What another rank does, in words to follow "rank 1, which"; it is asked, for up to a second.
  std::string does(int rank) const;

  std::uint64_t sequence() const;  // collectives started
  std::array<Traffic, kKinds> traffic() const;
  /// What this rank has moved was for the group to be made, which no user asked for.
  void count_anew();
  /// The table's candidates for a call of `bytes` on tensors in heaps or elsewhere,
  /// the pick and the reason.
  std::string explain(Kind kind, std::size_t bytes, bool in_heaps) const;
  Prediction predict(Kind kind, std::size_t bytes, bool in_heaps) const;
  /// "shm: 4 ranks of one host" and the like.
  std::string transport() const;
  /// Outlives the communicator where somebody holds it.
  std::shared_ptr<Recorder> recorder() const;
  /// To the call that just ended, while there is a log or a trace. In a job.
  LastToCome last_to_come() const;
  /// What this rank shows of a group on several hosts, of which this one is that of a host.
  MultiNodeState& whole() const;
  /// A rank's heap as this rank maps it, empty if it has none.
  std::span<std::byte> heap(int rank) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;  // shared with the progress thread
};

}  // namespace dreamcomm

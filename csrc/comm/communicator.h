// One rank's membership in a group within one host: runs requests and messages, counts bytes.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/group_communicator.h"
#include "core/error.h"
#include "core/record.h"
#include "core/request.h"

namespace dreamcomm {

struct Costs;           // algorithms/cost/costs.h: what algorithms are chosen by
class Fabric;           // transport/fabric.h: the windows of all ranks
class Heap;             // transport/shm/heap.h: memory that peers map
class Recorder;         // comm/record/recorder.h: what is noted of operations
struct MultiNodeState;  // transport/window.h: what a rank shows of a group on several nodes
class RemoteBarrier;    // comm/barrier/remote_barrier.h: a monitored barrier on other nodes

/// The name of a program's first group, which messages leave out.
inline constexpr const char* kDefaultGroup = "default";

struct CommOptions {
  std::string group = kDefaultGroup;  // its name in messages
  std::string algorithm = "auto";     // or a row's name: direct, ring, master, ...
  bool fixed_order = true;            // reductions in rank order only
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  /// Says where in the program this thread makes its call, as " at file:line", or "". Called
  /// only after an error.
  std::function<std::string()> call_site{};
  /// Warns the user of what may become an error, as a late peer. Any thread.
  std::function<void(const std::string&)> warn{};
  /// The members' ranks in the job, for records; empty: the same.
  std::vector<int> world_ranks{};
  /// In one host's part of a multi-node group: the whole group's, as messages name them.
  std::vector<int> world_ranks_of_whole{};
};

class Communicator final : public GroupCommunicator {
 public:
  Communicator(std::unique_ptr<Fabric> fabric, CommOptions options);
  ~Communicator() override;  // leaves the group
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const override;
  int size() const override;

  /// Agrees with all ranks on the costs that algorithms are chosen by: those that
  /// rank 0 knows, or, if it knows none, measured here in under a second. Collective,
  /// before any other call; without it fixed costs serve. `heap` is this rank's.
  /// Returns whether the costs hold for other groups, too: heaps were not too full to be
  /// measured. Waits until `deadline`, by default for the group's timeout, 10 s at least.
  /// Throws Error, after which the group is unusable.
  bool tune(const std::optional<Costs>& known, Heap* heap, const Interrupt& interrupt = {},
            std::optional<Clock::time_point> deadline = std::nullopt);
  bool all_have_heaps() const;
  const Costs& costs() const;

  void run(const Request& request, const Interrupt& interrupt = {}) override;
  void submit(std::function<void()> job) override;
  void run_in_turn(const std::function<void()>& job, const Interrupt& interrupt = {}) override;
  void run_ordered(const Request& request, const Interrupt& interrupt = {}) override;
  /// As run_ordered(), for a part of a call that was validated: a part is not validated again.
  void run_part(const Request& part, const Interrupt& interrupt);

  std::shared_ptr<Completion> send(const Cargo& cargo, int peer, std::uint64_t tag,
                                   Clock::time_point deadline) override;
  std::shared_ptr<Completion> receive(const Cargo& cargo, std::optional<int> peer,
                                      std::uint64_t tag, Clock::time_point deadline) override;
  /// The same for memory that the caller keeps.
  std::shared_ptr<Completion> send(Block data, int peer, std::uint64_t tag,
                                   Clock::time_point deadline);
  std::shared_ptr<Completion> receive(Block data, std::optional<int> peer, std::uint64_t tag,
                                      Clock::time_point deadline);
  void wait(Completion& completion, const Interrupt& interrupt = {}) override;
  void cancel(const Completion& completion) override;
  /// Removes a receive from any source that another node's message has completed.
  void withdraw(const Completion& completion);
  /// Wakes this rank's waiting threads: something outside this communicator was completed.
  void ring();

  /// Waits in a job by `wait()`, which returns true when its wait is over, and false now and then.
  /// Between, checks the deadline, failures and deaths as a wait for peers does; peers may leave
  /// cleanly meanwhile. `what` names the call and what it waits for.
  struct LongWait {
    Clock::time_point deadline;
    Clock::duration grace;  // after the deadline, without a warning
    bool& warned;           // whether the user was warned in this call
  };
  void wait_through(const std::function<bool()>& wait, const std::function<std::string()>& what,
                    const LongWait& terms, const Interrupt& interrupt = {});
  /// Warns the user of what may become an error. Any thread.
  void warn(const std::string& text) const;

  void monitored_barrier(std::chrono::milliseconds timeout, bool all, const Interrupt& interrupt,
                         std::int64_t issued) override;
  /// Counts as issued the collectives that have begun.
  void monitored_barrier(std::chrono::milliseconds timeout, bool all,
                         const Interrupt& interrupt = {});
  /// In one host's part of a multi-node group; `remote` is rank 0's access to the other nodes.
  void monitored_barrier(std::chrono::milliseconds timeout, bool all, const Interrupt& interrupt,
                         std::int64_t issued, RemoteBarrier* remote);

  void abort(const std::string& reason) override;
  void wait_for_readers() override {}  // what a rank posts in shared memory outlives it
  void shutdown() override;
  /// Throws Error(kAborted) if the group is unusable.
  void check_usable(const char* operation) const;
  std::string who() const override;
  std::optional<std::string> failure() const override;
  std::optional<ErrorKind> failure_kind() const override;
  bool has_ended(int rank) const override;

  /// Names a rank that died or aborted the group, and its last call; or empty. System calls.
  std::string lost() const;
  /// The same for that rank, also if it left; or empty.
  std::string lost(int rank) const;
  /// True if all ranks have entered the call that this rank is in.
  bool all_have_come() const;
  std::string awaited(Clock::duration waited) const override;
  std::string awaited(const Completion& completion, Clock::duration waited) const override;
  std::string does(int rank) const override;
  /// The messages that go to other nodes.
  struct RemoteMessages {
    std::function<std::string(const Completion& completion)> lacks{};  // what one waits for there
    /// Called again and again, with the reason, once all other ranks here have left or died.
    std::function<void(const std::string& why)> alone{};
  };
  /// Returns once no thread uses the earlier ones.
  void set_remote_messages(RemoteMessages messages);

  std::uint64_t sequence() const;  // collectives started
  std::vector<std::vector<int>> hosts() const override;
  Communicator& single_host(const char* /*what*/) override { return *this; }
  std::string describe() const override;
  std::string explain(Kind kind, std::size_t bytes, bool in_heaps) const override;
  Prediction predict(Kind kind, std::size_t bytes, bool in_heaps) const override;
  std::array<Traffic, kKinds> traffic() const override;
  std::optional<std::array<WireTraffic, kKinds>> wire_traffic() const override {
    return std::nullopt;
  }
  /// Sets the traffic to 0: setting up a group also moves bytes, which no program asked for.
  void reset_traffic();
  /// Outlives the communicator while a caller holds it.
  std::shared_ptr<Recorder> recorder() const;
  /// The last rank to enter the call that just ended, while there is a log or a trace. In a job.
  LastToCome last_to_come() const;
  /// In one host's part of a multi-node group: what this rank shows of the whole.
  MultiNodeState& whole() const;
  /// A rank's heap as this rank maps it, empty if it has none.
  std::span<std::byte> heap(int rank) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;  // shared with the progress thread
};

}  // namespace dreamcomm

// The interface of a group for CPU tensors: one host's (comm/communicator.h), or several nodes'
// (internode/hier_communicator.h).
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/request.h"
#include "transport/link.h"

namespace dreamcomm {

class Communicator;  // comm/communicator.h
class Completion;    // comm/p2p/completion.h: a message under way

/// Bytes this rank handed to and took from its peers in one kind of operation, in shared memory.
struct Traffic {
  std::uint64_t calls = 0;
  std::uint64_t sent = 0;      // bytes of this rank that peers read, counted per reader
  std::uint64_t received = 0;  // bytes this rank read from peers
  std::uint64_t in_place = 0;  // of the calls, those on tensors in heaps, without a copy
};

/// Bytes this rank sent to and received from other nodes in one kind of operation.
struct WireTraffic {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
};

/// The cost model's expectation of a call.
struct Prediction {
  std::string algorithm;
  double seconds = 0;
};

/// Called by a thread that has waited a while; throws to end the wait.
using Interrupt = std::function<void()>;

/// One rank's membership in a group. Ranks are the group's. Errors are dreamcomm::Error. Every
/// error of a collective except kInvalid and kMismatch ends the group.
class GroupCommunicator {
 public:
  GroupCommunicator() = default;
  virtual ~GroupCommunicator() = default;
  GroupCommunicator(const GroupCommunicator&) = delete;
  GroupCommunicator& operator=(const GroupCommunicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Validates the collective and runs it on the calling thread, after those called before it.
  virtual void run(const Request& request, const Interrupt& interrupt = {}) = 0;
  /// Runs `job` on the group's progress thread after everything called before. The job calls
  /// `run_ordered` for its requests and must not throw.
  virtual void submit(std::function<void()> job) = 0;
  /// Runs `job` on the calling thread after everything called before.
  virtual void run_in_turn(const std::function<void()>& job, const Interrupt& interrupt = {}) = 0;
  /// Validates the collective and runs it now. Only inside a job of submit or run_in_turn.
  virtual void run_ordered(const Request& request, const Interrupt& interrupt = {}) = 0;

  /// Messages are matched by (source, tag) in the order sent. A receive without `peer` takes from
  /// any source. The memory must stay valid until the message is done; a node's engine may use
  /// the cargo's for longer. Progress needs no further call.
  virtual std::shared_ptr<Completion> send(const Cargo& cargo, int peer, std::uint64_t tag,
                                           Clock::time_point deadline) = 0;
  virtual std::shared_ptr<Completion> receive(const Cargo& cargo, std::optional<int> peer,
                                              std::uint64_t tag, Clock::time_point deadline) = 0;
  /// Waits for a message, and helps it along. Throws what it failed with.
  virtual void wait(Completion& completion, const Interrupt& interrupt = {}) = 0;
  /// Ends a receive that no thread waits for, unless its message is there.
  virtual void cancel(const Completion& completion) = 0;

  /// Waits until all ranks called it, outside the order of collectives: the group stays usable
  /// when it fails. Rank 0 names the missing ranks: the first, or with `all` every one; the other
  /// ranks get the names from rank 0. `issued`: this rank's collectives so far.
  virtual void monitored_barrier(std::chrono::milliseconds timeout, bool all,
                                 const Interrupt& interrupt, std::int64_t issued) = 0;

  /// Fails all waiting and later calls with `reason`, on this rank and on its peers. Any thread.
  virtual void abort(const std::string& reason) = 0;
  /// Before shutdown() of a group that did not fail: waits, for a moment at most, until the other
  /// nodes have read what this rank posted last.
  virtual void wait_for_readers() = 0;
  /// Ends the progress thread and leaves the group; waits for submitted jobs unless aborted. Later
  /// calls fail. Idempotent, any thread.
  virtual void shutdown() = 0;
  /// Why the group is unusable, or nothing.
  virtual std::optional<std::string> failure() const = 0;
  /// The kind of that error; also nothing after a shutdown.
  virtual std::optional<ErrorKind> failure_kind() const = 0;
  /// True if the process of a rank of this host is known to have ended, also after the group has
  /// failed; false for other nodes' ranks, and once this rank has left. A system call.
  virtual bool has_ended(int rank) const = 0;

  /// "rank 1 of 4 in group 'default'".
  virtual std::string who() const = 0;
  /// Says what another rank does, in words to follow "rank 1, which"; asks it, for up to a second.
  virtual std::string does(int rank) const = 0;
  /// "rank 1, which last called ...": the rank this rank's call waits for, or "". Asks that rank,
  /// for a part of the time `waited`.
  virtual std::string awaited(Clock::duration waited) const = 0;
  /// The same for a message: "rank 1 has not sent it; it last called ...".
  virtual std::string awaited(const Completion& completion, Clock::duration waited) const = 0;

  /// The ranks of each host.
  virtual std::vector<std::vector<int>> hosts() const = 0;
  /// This group as one host's. Throws Error(kInvalid) if it has several; `what` opens the text.
  virtual Communicator& single_host(const char* what) = 0;
  /// "shm: 4 ranks of one host" and the like.
  virtual std::string describe() const = 0;
  /// The candidates for a call of `bytes` on tensors in heaps or elsewhere, the pick, the reason.
  virtual std::string explain(Kind kind, std::size_t bytes, bool in_heaps) const = 0;
  virtual Prediction predict(Kind kind, std::size_t bytes, bool in_heaps) const = 0;
  virtual std::array<Traffic, kKinds> traffic() const = 0;
  /// Nothing in a group of one host.
  virtual std::optional<std::array<WireTraffic, kKinds>> wire_traffic() const = 0;
};

}  // namespace dreamcomm

// A group whose ranks are on several nodes: shared memory within each host, another engine's
// messages between them.
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

#include "comm/communicator.h"
#include "comm/group_communicator.h"
#include "comm/record/recorder.h"
#include "core/flag.h"
#include "core/tsc_clock.h"
#include "internode/barrier/monitored_barrier.h"
#include "internode/collectives/link_context.h"
#include "internode/cost/model.h"
#include "internode/liveness/failure_cause.h"
#include "internode/liveness/wait_interrupter.h"
#include "internode/p2p/tag_matching.h"
#include "transport/link.h"
#include "transport/topology.h"

namespace dreamcomm {

struct HierarchicalOptions {
  std::string group{};  // "group '1' (ranks 2, 3 of the job)", or "" where messages leave it out
  /// As CommOptions::call_site.
  std::function<std::string()> call_site{};
  std::shared_ptr<Heap> heap{};          // of this process; null: none
  std::shared_ptr<Recorder> recorder{};  // of the whole group; null: nothing is recorded
  /// Which way a call takes, the same on every rank; null: as the model says.
  std::function<Way(Kind kind, std::size_t bytes)> choose{};
  bool widens_halves = true;  // 16-bit floating types are reduced, and sent, in float32
  AbortReasons reasons{};
  std::shared_ptr<BarrierBoard> board{};  // of a host's leader, see InternodeBarrier
};

/// Order of reductions: the ranks of a host are combined from left to right in rank order, then
/// the hosts' results in the order of the hosts (Topology). 16-bit floating types are computed,
/// and cross the wire, in float32, and are rounded once at the end, unless `widens_halves` is off.
/// So every rank, every run and every size gives the same bits; they are those of one host where
/// each host has one rank.
class HierarchicalCommunicator final : public GroupCommunicator {
 public:
  /// `host` is that of the ranks of this rank's host, by their local indices.
  HierarchicalCommunicator(std::shared_ptr<Communicator> host, Topology topology, int rank,
                           std::unique_ptr<Link> link, HierarchicalOptions options);
  ~HierarchicalCommunicator() override;
  HierarchicalCommunicator(const HierarchicalCommunicator&) = delete;
  HierarchicalCommunicator& operator=(const HierarchicalCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return topology_.size(); }

  /// Collective, before the first call: chooses by the costs that rank 0's host has and by measured
  /// costs of messages between nodes, until `deadline`. Without it fixed costs serve.
  void tune(Clock::time_point deadline, const Interrupt& interrupt);
  /// Sends messages to ranks of other nodes by `link`, which carries nothing else. Once, before the
  /// first message.
  void carry_messages(std::unique_ptr<Link> link);
  /// Collective: returns once all ranks called it, so that none leaves while others connect. Counts
  /// as no call.
  void sync(Clock::time_point deadline, const Interrupt& interrupt);

  void run(const Request& request, const Interrupt& interrupt = {}) override;
  void submit(std::function<void()> job) override;
  void run_in_turn(const std::function<void()>& job, const Interrupt& interrupt = {}) override;
  void run_ordered(const Request& request, const Interrupt& interrupt = {}) override;

  /// Within the host through shared memory, to other nodes by the link of carry_messages().
  std::shared_ptr<Completion> send(const Cargo& cargo, int peer, std::uint64_t tag,
                                   Clock::time_point deadline) override;
  std::shared_ptr<Completion> receive(const Cargo& cargo, std::optional<int> peer,
                                      std::uint64_t tag, Clock::time_point deadline) override;
  void wait(Completion& completion, const Interrupt& interrupt = {}) override;
  void cancel(const Completion& completion) override;

  void monitored_barrier(std::chrono::milliseconds timeout, bool all, const Interrupt& interrupt,
                         std::int64_t issued) override;

  /// Also ends the link; posts the reason for the other nodes.
  void abort(const std::string& reason) override;
  void wait_for_readers() override;
  void shutdown() override;
  /// Ends the link, cleanly if no call is under way. Any thread.
  void close();
  std::optional<std::string> failure() const override;
  std::optional<ErrorKind> failure_kind() const override;
  bool has_ended(int rank) const override;

  std::string who() const override;
  std::string does(int rank) const override;
  std::string awaited(Clock::duration waited) const override;
  std::string awaited(const Completion& completion, Clock::duration waited) const override;

  const Topology& topology() const { return topology_; }
  std::vector<std::vector<int>> hosts() const override;
  Communicator& single_host(const char* what) override;
  /// "2 hosts: ...".
  std::string describe() const override;
  /// Which way a call takes, and its predicted time; `bytes` as for ways().
  Way way(Kind kind, std::size_t bytes) const;
  const LevelCosts& costs() const { return costs_; }
  std::string explain(Kind kind, std::size_t bytes, bool in_heaps) const override;
  Prediction predict(Kind kind, std::size_t bytes, bool in_heaps) const override;
  /// The calls are the group's, the bytes those of their parts within this host.
  std::array<Traffic, kKinds> traffic() const override;
  std::optional<std::array<WireTraffic, kKinds>> wire_traffic() const override;

 private:
  bool is_near(int rank) const { return topology_.host_of(rank) == topology_.host_of(rank_); }
  Way way_of(const Request& request);
  void run(LinkContext& context, const Request& request, bool leaders);
  void run_uncounted(const Request& request, const Way& way, const Interrupt& interrupt);
  double slowest(double seconds, Clock::time_point deadline, const Interrupt& interrupt);
  void report_lost_leader() const;
  template <typename Act>
  void abort_on_error(const Request& request, Act&& act);

  const std::shared_ptr<Communicator> host_;
  const Topology topology_;
  const int rank_;
  const std::unique_ptr<Link> link_;
  const HierarchicalOptions options_;
  WaitInterrupter interrupter_;
  ConnectionMonitor monitor_;
  PrepostedReceives preposted_;
  const FailureCause failure_cause_{options_.reasons, monitor_, [this] { return host_->lost(); }};
  const std::shared_ptr<Mark> call_failed_ = std::make_shared<Mark>();
  const Levels levels_;  // of the members before it
  LevelCosts costs_;     // INVARIANT: the same on every rank, as ways are chosen by it
  struct Chosen {
    Kind kind;
    std::size_t bytes;
    Way way;
  };
  /// The last choice: choosing takes some microseconds, and programs repeat calls.
  std::optional<Chosen> last_;
  /// Calls begun, with those that measured. INVARIANT: the same on every rank, as messages tell
  /// calls apart by it.
  std::uint64_t calls_ = 0;
  std::uint64_t before_ = 0;  // how many of them came before the program's first
  Flag reasons_posted_;       // only the first reason is posted
  const std::shared_ptr<Recorder> recorder_;
  TscClock clock_;  // of calls, which run one at a time
  std::unique_ptr<InternodeTagMatcher> messages_;
  std::optional<InternodeBarrier> barrier_;  // of the host's leader
};

}  // namespace dreamcomm

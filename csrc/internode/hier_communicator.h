// Collectives of a group whose ranks are on several hosts: shared memory inside of each, another
// engine's messages between them.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/communicator.h"
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
  std::string group{};  // "group '1' (ranks 2, 3 of the job)", or "" where it need not be told
  /// As CommOptions::call_site.
  std::function<std::string()> call_site{};
  std::shared_ptr<Heap> heap{};          // of this process; null: none
  std::shared_ptr<Recorder> recorder{};  // of the whole group; null: nobody keeps anything
  /// How a call goes, the same on every rank; null: as the model says.
  std::function<Way(Kind kind, std::size_t bytes)> choose{};
  bool widens_halves = true;  // 16-bit floating types are added up, and sent, in float32
  AbortReasons reasons{};
  std::shared_ptr<BarrierBoard> board{};  // of a host's leader, see InternodeBarrier
};

/// Order of reductions: the ranks of a host are combined from left to right in rank order, then
/// the hosts' results in the order of the hosts (Topology). 16-bit floating types are computed,
/// and cross the wire, in float32, and are rounded once at the end (unless they shall not widen).
/// So every rank, every run and every size gives the same bits; they are those of one host where
/// each host has one rank.
class HierarchicalCommunicator {
 public:
  /// `host` is of the ranks of this one's host, by their local indices, and outlives the span.
  HierarchicalCommunicator(Communicator& host, Topology topology, int rank,
                           std::unique_ptr<Link> link, HierarchicalOptions options);
  ~HierarchicalCommunicator();
  HierarchicalCommunicator(const HierarchicalCommunicator&) = delete;
  HierarchicalCommunicator& operator=(const HierarchicalCommunicator&) = delete;

  /// As Communicator::run_ordered, in a job of the host's communicator; with the group's ranks.
  void run_ordered(const Request& request, const Interrupt& interrupt = {});
  /// Collective, before the first call: chooses by the costs that rank 0's host has and that the
  /// messages between hosts turn out to have, until `deadline`. Without it by fixed ones.
  void tune(Clock::time_point deadline, const Interrupt& interrupt);
  /// Messages to ranks of other hosts go by `link`, as nothing else does. Once, before the first.
  void carry_messages(std::unique_ptr<Link> link);
  /// Collective: returns once all ranks have come, so that none leaves while others connect.
  void meet(Clock::time_point deadline, const Interrupt& interrupt);
  /// As Communicator's, with the group's ranks: through shared memory to those of this host.
  std::shared_ptr<Completion> send(const Cargo& cargo, int rank, std::uint64_t tag,
                                   Clock::time_point deadline);
  std::shared_ptr<Completion> receive(const Cargo& cargo, std::optional<int> rank,
                                      std::uint64_t tag, Clock::time_point deadline);

  /// As Communicator's, with the group's ranks, of which rank 0 judges.
  void monitored_barrier(std::chrono::milliseconds timeout, bool all, const Interrupt& interrupt,
                         std::int64_t issued);
  /// The group ends in good order: what this rank has said last is heard. Takes a moment at most.
  void stay_until_heard();

  /// Ends the calls under way, with the link; the other hosts' ranks are told why. Any thread.
  void give_up(const std::string& reason);
  /// Ends the link, in good order where no call is under way. Any thread.
  void close();

  const Topology& topology() const { return topology_; }
  /// "2 hosts: ...".
  std::string describe() const;
  /// How a call goes, and how long that is predicted to take; `bytes` as of ways().
  Way way(Kind kind, std::size_t bytes) const;
  const LevelCosts& costs() const { return costs_; }
  /// How a call of so many bytes would go, and why.
  std::string explain(Kind kind, std::size_t bytes) const;
  /// Bytes of this rank between hosts.
  std::array<WireTraffic, kKinds> traffic() const;

 private:
  bool is_near(int rank) const { return topology_.host_of(rank) == topology_.host_of(rank_); }
  Way way_of(const Request& request);
  void run(LinkContext& context, const Request& request, bool leaders);
  void run_uncounted(const Request& request, const Way& way, const Interrupt& interrupt);
  double slowest(double seconds, Clock::time_point deadline, const Interrupt& interrupt);
  void tell_of_leader() const;
  template <typename Act>
  void watched(const Request& request, Act&& act);

  Communicator& host_;
  const Topology topology_;
  const int rank_;
  const std::unique_ptr<Link> link_;
  const HierarchicalOptions options_;
  WaitInterrupter interrupter_;
  ConnectionMonitor monitor_;
  PrepostedReceives preposted_;
  const FailureCause failure_cause_{options_.reasons, monitor_, [this] { return host_.lost(); }};
  const std::shared_ptr<Mark> spoilt_ = std::make_shared<Mark>();
  const Levels levels_;  // of the members before it
  LevelCosts costs_;     // INVARIANT: the same on every rank, as ways are chosen by them
  struct Chosen {
    Kind kind;
    std::size_t bytes;
    Way way;
  };
  std::optional<Chosen>
      last_;                  // choosing takes some microseconds, and calls come in rows of equals
  std::uint64_t calls_ = 0;   // begun: INVARIANT: the same on every rank, as messages tell calls
                              // apart by it; with those that measured
  std::uint64_t before_ = 0;  // of these, those before the first of the program's
  Flag told_;                 // how often a reason was told: the first is the one
  const std::shared_ptr<Recorder> recorder_;
  TscClock clock_;  // of calls, which run one at a time
  std::unique_ptr<InternodeTagMatcher> messages_;
  std::optional<InternodeBarrier> barrier_;  // of the host's leader
};

}  // namespace dreamcomm

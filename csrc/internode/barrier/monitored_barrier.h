// The monitored barrier of a multi-node group.
//
// Each host's leader (its lowest rank) counts its ranks. Rank 0, which leads the first host,
// decides. The leaders write to each other on a board, without messages: the link between hosts is
// not used, so a failed barrier leaves no message behind.
//   a host's leader  posts that it is in barrier n; then the result of counting its ranks, or that
//                    the timeout of one of them has ended; and at the end that it has left n
//   rank 0           posts that it is in n; then, if it has to name ranks, that it asks which are
//                    missing; and at the end its verdict, with the collectives that it had issued
// A lost leader posts nothing more: the end of its connection shows that, and the ranks of its host
// that are in the barrier report its last action (AbortReasons).
// INVARIANT: each text names its barrier, and rank 0 passes n only if every leader has posted that
// all of its ranks are in n. So the age of a text does not matter, nor that a text between two
// others is never read: a rank that has not read yet that a leader entered waits a little longer.
// INVARIANT: the next barrier cannot pass before all leaders have left this one. So the verdict
// that a leader finds is of its barrier, or the leader has failed there and rank 0 has advanced.
// INVARIANT: a leader posts before it ends, and counts as missing only if its texts have been read
// since it was seen to be lost. So a rank 0 that has decided and left cleanly is believed. As
// within a host, a leader that enters a failed barrier late gets an error, and does not count for
// the next one, unless it has issued more collectives since: then it has left that barrier out.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/barrier/remote_barrier.h"
#include "internode/barrier/board.h"
#include "internode/barrier/messages.h"
#include "internode/liveness/connection_monitor.h"
#include "internode/liveness/failure_cause.h"
#include "transport/topology.h"

namespace dreamcomm {

/// One leader's part of the barrier.
class InternodeBarrier final : public RemoteBarrier {
 public:
  /// The keys that a leader reads: rank 0 those of the other hosts' leaders, in the order of the
  /// hosts, and the other leaders rank 0's.
  static std::vector<std::string> keys(const Topology& topology, int rank);
  /// The ways in which it learns about the other leaders.
  struct Means {
    std::shared_ptr<BarrierBoard> board;  // reads these keys
    ConnectionMonitor& monitor;
    const FailureCause& causes;
  };
  /// `who` describes this rank. All references must outlive this.
  InternodeBarrier(Means means, const Topology& topology, int rank, std::string who);

  std::optional<BarrierOutcome> enter(const Terms& terms) override;
  bool is_over() override;
  void report(const BarrierCount& count) override;
  std::string awaited() override;
  std::optional<BarrierOutcome> outcome(int over) override;
  void leave(const std::string& interrupted) override;

  /// Waits, for a moment, until the leaders have read rank 0's last verdict: rank 0 may run the
  /// store.
  void wait_for_readers();

 private:
  using Report = barrier::Report;
  using State = Report::State;

  bool decides() const { return rank_ == 0; }
  std::string place(int rank) const;
  int leader(std::size_t report) const {
    return topology_.rank_at(static_cast<int>(report) + 1, 0);
  }
  void look(std::chrono::milliseconds patience = {});
  void post();
  bool has_seen_peer();
  bool catch_up();
  void catch_up_with_leaders();
  void catch_up_with_rank_0();
  BarrierOutcome late() const;
  void look_for_lost();
  std::map<int, std::string> newly_lost();
  bool needs(int leader) const;
  bool is_in(const Report& report) const;
  bool has_left(const Report& report) const;
  std::optional<BarrierOutcome> decide(int over);
  BarrierOutcome conclude(int over);
  struct Absent {
    enum class Why { kGone, kLeft, kLate } why;  // the foremost first
    int rank;
    std::string act;
  };
  std::vector<Absent> absent() const;
  std::optional<BarrierOutcome> apply_verdict(int over);

  const Means means_;
  const Topology& topology_;
  const int rank_;
  const std::string who_;
  std::mutex mutex_;          // another thread may end the group
  std::uint32_t number_ = 0;  // of the barrier that is next, or under way
  bool under_way_ = false;
  bool has_seen_peer_ = false;  // another rank in it
  bool too_late_ = false;       // rank 0 entered after another leader had stopped waiting
  Terms terms_;
  Report own_;                   // rank 0 uses only its count
  barrier::Verdict verdict_;     // rank 0's own
  BarrierOutcome outcome_;       // of the one under way; rank 0's
  std::vector<Report> reports_;  // the other hosts', as rank 0 last read them
  barrier::Verdict read_;        // rank 0's, as another leader last read it
  /// Since when rank 0 decides which ranks to name, or another leader waits for its verdict.
  std::optional<Clock::time_point> deciding_;
  std::map<int, std::string> gone_;  // lost leaders, with the reasons
  Clock::time_point next_check_;     // when to check for lost leaders again
};

}  // namespace dreamcomm

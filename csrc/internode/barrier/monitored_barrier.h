// The monitored barrier of a group on several hosts.
//
// Each host's leader (its lowest rank) calls the roll of its ranks, and rank 0, who leads the first
// host, judges. They write to each other on bulletins, which nobody need come to give: the link
// between hosts is left alone, so that a barrier that fails leaves no message behind.
//   a host's leader  posts that it is in roll call n, then what counting its ranks has come to, or
//                    that the time of one of them is over; and at the end that it has left n
//   rank 0           posts that it is in n; then, if it has to name ranks, that it asks who is
//                    missing; and at the end its verdict, with the collectives that it had issued
// One that has gone posts no more: the end of its connection says that, and those of its host's
// ranks that have come tell what it did last (Reasons).
// INVARIANT: each text says of which roll call it is, and rank 0 passes n only if every leader says
// that all of its ranks are in n. So it does not matter how old a text is, nor whether one between
// two others is never seen: who has not read yet that a leader came waits a little longer.
// INVARIANT: the next one cannot pass before all leaders have left this one; so the verdict that a
// leader finds is of its roll call, or it has failed there and rank 0 has gone on.
// INVARIANT: a leader posts before it goes, and is taken to be missing only where its texts have
// been read since it was seen to be gone; so who has judged, and left in good order, is believed.
// As within a host, a leader that comes late to a failed one is told, and does not pass for the
// next, unless it has issued more collectives since: then it has left that one out.
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

/// Of one leader.
class InternodeBarrier final : public RemoteBarrier {
 public:
  /// Whose posts a leader reads: rank 0 those of the other hosts' leaders, in the order of the
  /// hosts, and these rank 0's.
  static std::vector<std::string> keys(const Topology& topology, int rank);
  /// How it hears of the other leaders.
  struct Means {
    std::shared_ptr<BarrierBoard> board;  // reads these keys
    ConnectionMonitor& monitor;
    const FailureCause& causes;
  };
  /// `who` is this rank, in words. All references must outlive this.
  InternodeBarrier(Means means, const Topology& topology, int rank, std::string who);

  std::optional<BarrierOutcome> enter(const Terms& terms) override;
  bool is_over() override;
  void report(const BarrierCount& count) override;
  std::string awaited() override;
  std::optional<BarrierOutcome> outcome(int over) override;
  void leave(const std::string& interrupted) override;

  /// The leaders read rank 0's last verdict before it goes, as it may be the one who keeps the
  /// store; for a moment.
  void stay_until_heard();

 private:
  using Report = barrier::Report;
  using State = Report::State;

  bool judges() const { return rank_ == 0; }
  std::string place(int rank) const;
  int leader(std::size_t report) const {
    return topology_.rank_at(static_cast<int>(report) + 1, 0);
  }
  void look(std::chrono::milliseconds patience = {});
  void post();
  bool has_met();
  bool catch_up();
  void catch_up_with_leaders();
  void catch_up_with_rank_0();
  BarrierOutcome late() const;
  void look_for_gone();
  std::map<int, std::string> newly_gone();
  bool needs(int leader) const;
  bool is_in(const Report& report) const;
  bool has_left(const Report& report) const;
  std::optional<BarrierOutcome> judge(int over);
  BarrierOutcome conclude(int over);
  struct Absent {
    enum class Why { kGone, kLeft, kLate } why;  // the foremost first
    int rank;
    std::string act;
  };
  std::vector<Absent> absent() const;
  std::optional<BarrierOutcome> heed(int over);

  const Means means_;
  const Topology& topology_;
  const int rank_;
  const std::string who_;
  std::mutex mutex_;          // the end of the group comes from another thread
  std::uint32_t number_ = 0;  // of the roll call that is next, or under way
  bool under_way_ = false;
  bool has_met_ = false;   // somebody in it
  bool too_late_ = false;  // rank 0 came when another leader had stopped waiting
  Terms terms_;
  Report own_;                   // of rank 0 for its count
  barrier::Verdict verdict_;     // by rank 0
  BarrierOutcome outcome_;       // of the one under way, by rank 0
  std::vector<Report> reports_;  // as rank 0 has read them last, of the other hosts
  barrier::Verdict read_;        // as another leader has
  /// Since when rank 0 wants to name somebody, or another leader's time is over.
  std::optional<Clock::time_point> deciding_;
  std::map<int, std::string> gone_;  // other leaders, with why
  Clock::time_point next_glance_;    // whether one has gone
};

}  // namespace dreamcomm

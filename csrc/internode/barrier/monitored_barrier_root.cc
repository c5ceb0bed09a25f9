// Rank 0's part of a monitored barrier between hosts: which ranks are missing.
#include <algorithm>
#include <cstddef>

#include "comm/barrier/barrier_flags.h"
#include "core/error.h"
#include "internode/barrier/monitored_barrier.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAnswer{500};  // time to answer which ranks are missing

}  // namespace

/// Decides; for rank 0. It waits while all ranks may still enter, and for answers if it must name
/// ranks.
std::optional<BarrierOutcome> InternodeBarrier::decide(int over) {
  bool complete = own_.count.is_complete();
  bool fails = over >= 0 || !complete || !gone_.empty();
  bool answered = true;  // all leaders that are in it have counted their ranks
  bool named = !own_.count.missing.empty() || !gone_.empty();
  for (std::size_t i = 0; i < reports_.size(); ++i) {
    const Report& report = reports_[i];
    const bool counted = is_in(report) && report.has_count();
    const bool lacks = counted && !report.count.is_complete();
    complete = complete && counted && !lacks;
    fails = fails || has_left(report) || lacks || (is_in(report) && report.state == State::kOver);
    answered = answered && (!is_in(report) || counted || gone_.contains(leader(i)));
    named = named || (counted && !report.count.missing.empty());
  }
  if (complete) return BarrierOutcome{};
  if (!fails) return std::nullopt;
  if (!deciding_) {
    deciding_ = Clock::now();
    verdict_.asks = number_ + 1;
    if (!answered) post();
  }
  const bool enough = answered || (named && !terms_.all);
  if (!enough && Clock::now() < *deciding_ + kAnswer) return std::nullopt;
  outcome_ = conclude(over);
  return outcome_;
}

/// Lists the missing ranks. For a host whose leader has not entered, or has left, only that is
/// known. Every entry names its host, because readers may be on any.
std::vector<InternodeBarrier::Absent> InternodeBarrier::absent() const {
  std::vector<Absent> found;
  const auto add = [&](const BarrierCount& count, std::size_t host) {
    const std::string where = concat("on ", topology_.words(static_cast<int>(host)), ": ");
    const bool gone = (count.bits & barrier::kEnded) != 0;
    for (std::size_t i = 0; i < count.missing.size(); ++i) {
      found.push_back({gone ? Absent::Why::kGone : Absent::Why::kLate, count.missing[i],
                       where + count.acts[i]});
    }
  };
  add(own_.count, 0);
  for (std::size_t i = 0; i < reports_.size(); ++i) {
    const Report& report = reports_[i];
    const int leader = this->leader(i);
    const auto gone = gone_.find(leader);
    if (gone != gone_.end()) found.push_back({Absent::Why::kGone, leader, gone->second});
    if (is_in(report) && report.has_count()) {
      add(report.count, i + 1);
      continue;
    }
    if (gone != gone_.end()) continue;
    const std::string& why = report.count.problem;
    if (has_left(report)) {
      found.push_back(
          {Absent::Why::kLeft, leader,
           concat(place(leader), " has stopped waiting", why.empty() ? "" : ": ", why)});
    } else {
      const std::string act = is_in(report)
                                  ? concat(place(leader), " does not report who is missing there")
                                  : concat("nothing has arrived from ", place(leader));
      found.push_back({Absent::Why::kLate, leader, act});
    }
  }
  return found;
}

/// Names all missing ranks, in rank order, or the foremost.
BarrierOutcome InternodeBarrier::conclude(int over) {
  std::vector<Absent> absent = this->absent();
  std::sort(absent.begin(), absent.end(), [this](const Absent& a, const Absent& b) {
    return terms_.all || a.why == b.why ? a.rank < b.rank : a.why < b.why;
  });
  if (!terms_.all && absent.size() > 1) absent.resize(1);
  BarrierCount all = own_.count;  // for its problem
  all.missing.clear();
  all.acts.clear();
  for (const Absent& one : absent) {
    all.missing.push_back(one.rank);
    all.acts.push_back(one.act);
    if (one.why == Absent::Why::kGone) all.bits |= barrier::kEnded;
  }
  const milliseconds lasted = std::chrono::duration_cast<milliseconds>(Clock::now() - terms_.begin);
  all.lasted = std::min(lasted, terms_.timeout);
  for (const Report& report : reports_) {
    if (!is_in(report)) continue;
    all.bits |= report.count.bits;
    if (all.problem.empty()) all.problem = report.count.problem;
    if (over < 0 && report.state == State::kOver) over = report.over;
  }
  if (all.bits == 0) all.bits = barrier::kLate;
  const auto has_left = [](const Absent& one) { return one.why == Absent::Why::kLeft; };
  all.late = (all.late || (too_late_ && std::any_of(absent.begin(), absent.end(), has_left))) &&
             (all.bits & barrier::kEnded) == 0;
  std::string problem = all.problem.empty() ? describe_missing(all, who_) : all.problem;
  if (over > 0) problem += concat("; the timeout of rank ", over, " was over");
  return {all.bits, problem};
}

}  // namespace dreamcomm

// Rank 0's part of a monitored barrier: which ranks are missing, and whether to wait for them.
#include <algorithm>

#include "comm/barrier/barrier_flags.h"
#include "comm/barrier/monitored_barrier.h"
#include "comm/wait_watchdog.h"
#include "core/text.h"

namespace dreamcomm {

namespace {

/// For the other missing ranks to enter, once one is known not to.
constexpr std::chrono::milliseconds kRest{500};

/// Rank 0 checks the clock itself, and asks the missing ranks once. So the watchdog never times
/// out, not even if this process was stopped until long after the deadline.
constexpr Clock::duration kNeverOver = Clock::duration::max();

std::chrono::milliseconds since(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
}

}  // namespace

bool MonitoredBarrier::has_aborted(int rank) const {
  const std::uint32_t value = barrier::present(state_, rank).read();  // once: it may change
  const std::uint32_t own = state_.header().present.read();
  return value != own && reached(value, own);
}

bool MonitoredBarrier::some_have_aborted() const {
  for (int rank = 1; rank < state_.size(); ++rank) {
    if (has_aborted(rank)) return true;
  }
  return false;
}

bool MonitoredBarrier::all_present() const {
  for (int rank = 1; rank < state_.size(); ++rank) {
    if (!is_present(rank)) return false;
  }
  return true;
}

/// Returns a rank that ends the wait although some ranks have not entered: it has left this
/// barrier, or it is in it and its timeout has ended; or -1.
int MonitoredBarrier::ender() const {
  for (int rank = 1; rank < state_.size(); ++rank) {
    if (has_aborted(rank) || is_time_over(rank)) return rank;
  }
  return -1;
}

/// Only for a rank that is in the barrier: before it entered, the flag holds the end of an earlier
/// one.
bool MonitoredBarrier::is_time_over(int rank) const {
  return is_present(rank) && now_ns() >= state_.fabric().header(rank).barrier_ends_ns.read();
}

/// Returns a lost rank, present or not, or the foremost absent one, or -1.
int MonitoredBarrier::awaited() const {
  std::vector<int> absent;
  for (int rank = 1; rank < state_.size(); ++rank) {
    if (!is_present(rank)) absent.push_back(rank);
  }
  const int one = gone();
  return one >= 0 || absent.empty() ? one : foremost(absent);
}

/// Returns a lost rank, or -1.
int MonitoredBarrier::gone() const {
  for (int rank = state_.size() - 1; rank > 0; --rank) {
    if (!why_gone(state_.fabric(), rank).empty()) return rank;
  }
  return -1;
}

/// Returns a lost rank, or a rank that has left this barrier, or the first.
int MonitoredBarrier::foremost(const std::vector<int>& absent) const {
  const auto find = [&](const auto& is_so) {
    return std::find_if(absent.rbegin(), absent.rend(), is_so);
  };
  auto found = find([&](int rank) { return !why_gone(state_.fabric(), rank).empty(); });
  if (found == absent.rend()) found = find([&](int rank) { return has_aborted(rank); });
  return found == absent.rend() ? absent.front() : *found;
}

void MonitoredBarrier::watch(const Round& round, const std::function<bool()>& ready,
                             const std::function<int()>& blocker) {
  const std::function<std::string()> what = [] { return std::string("monitored_barrier"); };
  WaitWatchdog watchdog(state_, what, round.deadline, round.idle, round.interrupt, round.begin, {},
                        kNeverOver);
  watch(watchdog, ready, blocker);
}

/// Waits for other hosts, once the ranks of this one have been counted. It is a wait of its own, so
/// the user is warned if it lasts, and not when it begins. `complete`: all ranks had entered, and
/// none may be lost.
void MonitoredBarrier::watch_others(const Round& round, const std::function<bool()>& ready,
                                    bool complete) {
  const std::function<std::string()> what = [&] {
    return concat("monitored_barrier, in which rank ", state_.fabric().number(0), " waits for ",
                  round.terms.remote->awaited(), ",");
  };
  WaitWatchdog watchdog(state_, what, round.deadline, round.idle, round.interrupt, Clock::now(), {},
                        kNeverOver);
  bool warned = false;
  watchdog.warn_without_rank(warned);
  watch(watchdog, ready, [&] { return complete ? gone() : -1; });
}

void MonitoredBarrier::watch(WaitWatchdog& watchdog, const std::function<bool()>& ready,
                             const std::function<int()>& blocker) {
  watchdog.look_at_awaited_only();
  wait_until(state_.header().doorbell, state_.patience(), watchdog, ready, blocker);
  // Ranks may have left because this rank has aborted the group.
  if (!all_present()) watchdog.look(-1);
}

/// Waits for the rest if all missing ranks are to be named: there may be more than the lost one.
void MonitoredBarrier::await_rest(const Round& round) {
  if (!round.terms.all) return;
  const Clock::time_point until = std::min(round.deadline, Clock::now() + kRest);
  const auto over = [&] {
    bool is_over = all_present() || Clock::now() >= until;
    for (int rank = 1; rank < state_.size(); ++rank) is_over = is_over || is_time_over(rank);
    return is_over;
  };
  watch(round, over, [] { return -1; });
}

/// Waits for all ranks. Throws Error if rank 0's own wait is ended.
BarrierCount MonitoredBarrier::count(const Round& round) {
  bool complete = false;
  bool remote = false;
  const bool late = some_have_aborted();
  int rank = -1;
  const auto over = [&] {
    complete = all_present();
    if (!complete) rank = ender();
    if (complete || rank >= 0 || Clock::now() >= round.deadline) return true;
    return remote = round.terms.remote != nullptr && round.terms.remote->is_over();
  };
  try {
    watch(round, over, [&] { return awaited(); });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    const int gone = awaited();
    if (gone < 0 || is_present(gone)) {  // it had entered
      return {.bits = barrier::kEnded, .problem = error.what()};
    }
    await_rest(round);
    BarrierCount found = missing(since(round.begin), round.terms.all);
    if (!found.is_complete()) found.bits = barrier::kEnded;
    return found;
  }
  if (complete) return {};
  const bool waited = rank >= 0 && is_present(rank);
  if (rank >= 0 && !waited) await_rest(round);
  const auto lasted = rank < 0 && !remote ? round.terms.timeout : since(round.begin);
  BarrierCount found = missing(lasted, round.terms.all);
  if (found.is_complete()) return {};  // the last one has just entered
  found.late = late && found.bits == barrier::kLate;
  if (waited && round.terms.remote == nullptr) {  // else the group's rank 0 reports it
    found.acts.back() +=
        concat("; the timeout of rank ", state_.fabric().number(rank), " was over");
  }
  return found;
}

/// Returns a rank of this host that is in it and whose timeout has ended, with its number in the
/// group, or -1.
int MonitoredBarrier::time_over(const Round& round) const {
  if (Clock::now() >= round.deadline) return state_.fabric().number(0);
  for (int rank = 1; rank < state_.size(); ++rank) {
    if (is_time_over(rank)) return state_.fabric().number(rank);
  }
  return -1;
}

/// Counts this host's ranks, and then all others.
MonitoredBarrier::Outcome MonitoredBarrier::count_all(const Round& round) {
  RemoteBarrier& others = *round.terms.remote;
  std::optional<Outcome> found =
      others.enter({round.terms.all, round.terms.issued, round.terms.timeout, round.begin});
  bool complete = false;
  try {
    if (!found) {
      const BarrierCount here = count(round);
      complete = here.is_complete();
      others.report(here);
    }
    const auto over = [&] {
      if (!found) found = others.outcome(time_over(round));
      return found.has_value();
    };
    watch_others(round, over, complete);
  } catch (const Error& error) {
    others.leave(error.what());
    throw;
  } catch (...) {
    others.leave(concat("rank ", state_.fabric().number(0), " was interrupted in it"));
    throw;
  }
  others.leave("");
  return *found;
}

void MonitoredBarrier::call(const Round& round) {
  catch_up(round.terms.issued);
  const barrier::Presence presence(state_, round.terms);
  const int number = state_.fabric().number(0);
  Outcome found;
  try {
    if (round.terms.remote != nullptr) {
      found = count_all(round);
    } else {
      const BarrierCount count = this->count(round);
      const bool told = !count.problem.empty() || count.is_complete();
      found = {count.bits, told ? count.problem : describe_missing(count, state_.who())};
    }
  } catch (const Error& error) {
    publish_verdict({barrier::kEnded, error.what()}, round.terms);
    throw;
  } catch (...) {
    publish_verdict({barrier::kEnded, concat("rank ", number, " was interrupted in it")},
                    round.terms);
    throw;
  }
  publish_verdict(found, round.terms);
  if (found.bits == 0) return;
  const bool ended = (found.bits & barrier::kEnded) != 0;
  const bool missed = (found.bits & barrier::kMissed) != 0;
  const bool of_others = ended && !missed && number != 0;  // they get the same text
  throw Error(ended ? ErrorKind::kPeerLost : ErrorKind::kTimeout,
              of_others
                  ? concat("monitored_barrier on ", state_.who(), " cannot finish: ", found.problem)
                  : found.problem);
}

BarrierCount MonitoredBarrier::missing(std::chrono::milliseconds waited, bool all) const {
  std::vector<int> ranks;
  for (int rank = 1; rank < state_.size(); ++rank) {
    if (!is_present(rank)) ranks.push_back(rank);
  }
  if (ranks.empty()) return {};
  if (!all) ranks = {foremost(ranks)};
  const Fabric& fabric = state_.fabric();
  for (const int rank : ranks) {
    if (why_gone(fabric, rank).empty()) state_.inquire(rank);
  }
  const Clock::time_point until = RankState::answer_until(waited);
  BarrierCount found{.bits = barrier::kLate, .lasted = waited};
  for (const int rank : ranks) {
    const std::string gone = why_gone(fabric, rank);
    // The kind is the text's: the rank may leave after it is described here.
    if (!gone.empty()) found.bits = barrier::kEnded;
    const int number = fabric.number(rank);
    std::string act = gone.empty() ? "" : concat(gone, "; ");
    if (gone.empty() && has_aborted(rank)) act += concat("rank ", number, " has stopped waiting; ");
    act += concat("rank ", number, ' ',
                  gone.empty() ? state_.does(rank, until) : state_.last_act(rank));
    found.missing.push_back(number);
    found.acts.push_back(act);
  }
  return found;
}

std::string describe_missing(const BarrierCount& count, const std::string& who) {
  std::string names;
  std::string acts;
  for (std::size_t i = 0; i < count.missing.size(); ++i) {
    names += concat(names.empty() ? "" : ", ", count.missing[i]);
    acts += concat("; ", count.acts[i]);
  }
  if (count.late) return concat("monitored_barrier on ", who, " came too late", acts);
  return concat(count.missing.size() == 1 ? "Rank " : "Ranks ", names,
                " failed to pass monitoredBarrier in ", count.lasted.count(),
                " ms (group seen from ", who, ")", acts);
}

/// Publishes the verdict on the barrier that rank 0 is in.
void MonitoredBarrier::publish_verdict(const Outcome& found, const Terms& terms) {
  Header& header = state_.header();
  const std::uint32_t number = barrier::ended(header.present);
  barrier::calls_at(header, number).set(terms.issued);
  if (found.bits == 0) header.passed.publish(number + 1);
  put_text(header.verdict_text[number % 2], found.problem);
  header.verdict.publish(barrier::verdict_on(number) + found.bits);
  state_.ring_peers();
}

}  // namespace dreamcomm

#include "comm/barrier/monitored_barrier.h"

#include <algorithm>
#include <thread>

#include "comm/barrier/barrier_flags.h"
#include "comm/wait_watchdog.h"

namespace dreamcomm {

MonitoredBarrier::MonitoredBarrier(RankState& state) : state_(state) {}

void MonitoredBarrier::hold(const Terms& terms, const std::function<void()>& idle,
                            const std::function<void()>& interrupt) {
  state_.check_usable("monitored_barrier");
  Terms rest = terms;
  const std::unique_lock<std::mutex> lock = take_turn(rest, idle, interrupt);
  const Clock::time_point begin = Clock::now();
  const Round round{rest, idle, interrupt, begin, deadline_in(begin, rest.timeout)};
  if (state_.rank() == 0) {
    call(round);
  } else {
    answer(round);
  }
}

// Rarely does more than one thread of a rank wait here, so the wait is a simple one.
std::unique_lock<std::mutex> MonitoredBarrier::take_turn(Terms& terms,
                                                         const std::function<void()>& idle,
                                                         const std::function<void()>& interrupt) {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) return lock;
  const Clock::time_point begin = Clock::now();
  const Clock::time_point deadline = deadline_in(begin, terms.timeout);
  while (!lock.owns_lock()) {
    check(Clock::now() < deadline, ErrorKind::kTimeout, "monitored_barrier on ", state_.who(),
          " reached its timeout while this rank was in another one");
    if (idle) idle();
    if (interrupt) interrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (lock.try_lock()) break;
  }
  terms.timeout -= std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
  return lock;
}

/// Advances to the barrier that is next for the others, if this rank left some out.
void MonitoredBarrier::catch_up(std::int64_t issued) {
  Header& own = state_.header();
  while (true) {
    const std::uint32_t number = barrier::ended(own.present);
    const std::optional<std::int64_t> calls = calls_beyond(number, issued);
    if (!calls) return;
    barrier::calls_at(own, number).set(*calls);
    own.present.publish(2 * (number + 1));
  }
}

/// Returns the collectives that a peer had issued when it left barrier `number`, if this rank has
/// issued more by now: then this rank left that barrier out. It works for barriers of long ago,
/// too.
std::optional<std::int64_t> MonitoredBarrier::calls_beyond(std::uint32_t number,
                                                           std::int64_t issued) const {
  for (int rank = 0; rank < state_.size(); ++rank) {
    Header& peer = state_.fabric().header(rank);
    std::uint32_t ahead = barrier::ended(peer.present) - number;  // read before its calls
    // Rank 0 publishes its verdict before it leaves.
    const bool decided = rank == 0 && peer.verdict.has(barrier::verdict_on(number));
    if (ahead == 0 && decided) ahead = 1;
    if (!reached(ahead, 1)) continue;
    const std::int64_t calls = barrier::calls_at(peer, number).read();
    if (ahead > peer.monitored_barriers.size()) return std::min(calls, issued - 1);
    if (issued > calls) return calls;
  }
  return std::nullopt;
}

/// True if the rank is in the barrier that rank 0 is in.
bool MonitoredBarrier::is_present(int rank) const {
  return barrier::present(state_, rank).read() == state_.header().present.read();
}

/// Returns a rank that is not in the barrier and may still enter it; otherwise rank 0, which
/// decides.
int MonitoredBarrier::awaited_beside_rank_0() const {
  if (!why_gone(state_.fabric(), 0).empty()) return 0;
  for (int rank = 1; rank < state_.size(); ++rank) {
    if (!is_present(rank) && why_gone(state_.fabric(), rank).empty()) return rank;
  }
  return 0;
}

/// Applies rank 0's verdict on barrier `number`; `late`: rank 0 had ended it before this rank
/// entered. Throws Error unless the barrier passed.
void MonitoredBarrier::apply_verdict(std::uint32_t number, bool late) const {
  const Header& rank_0 = state_.fabric().header(0);
  if (rank_0.passed.read() == number + 1) return;
  const std::uint32_t verdict = rank_0.verdict.read();
  const auto& text = rank_0.verdict_text[number % 2];
  const std::string problem(text.begin(), std::find(text.begin(), text.end(), '\0'));
  // If it is not, rank 0 has ended others since, and the text may be theirs, or half of it.
  const bool own = (verdict & ~barrier::kBits) == barrier::verdict_on(number) &&
                   rank_0.verdict.read() == verdict;
  const std::string dead = own ? "" : describe_lost(state_);
  const std::string lost = dead.empty() ? "" : "; " + dead;
  const bool ended = own ? (verdict & barrier::kEnded) != 0 : !dead.empty();
  const ErrorKind kind = ended ? ErrorKind::kPeerLost : ErrorKind::kTimeout;
  // In this case the text describes all ranks of this host, in time or not.
  if (own && (verdict & barrier::kMissed) != 0) throw Error(kind, problem);
  const std::string who = concat("monitored_barrier on ", state_.who());
  if (late) {
    throw Error(kind, concat(who, " came too late: rank ", state_.fabric().number(0),
                             " has ended it without this rank",
                             own ? concat(": ", problem) : concat(", and others since", lost)));
  }
  check(own, kind, who, " was ended by rank ", state_.fabric().number(0),
        ", and others since, before this rank could read why", lost);
  throw Error(kind,
              kind == ErrorKind::kTimeout ? problem : concat(who, " cannot finish: ", problem));
}

void MonitoredBarrier::answer(const Round& round) {
  catch_up(round.terms.issued);
  const std::uint32_t number = barrier::ended(state_.header().present);
  // It is read before rank 0 can see this rank present, and let all pass.
  const bool late = state_.fabric().header(0).verdict.has(barrier::verdict_on(number));
  const barrier::Presence presence(state_, round.terms);
  if (!late) {
    await_rank_0(number, round);
    await_verdict(number, round);
  }
  apply_verdict(number, late);
}

/// Waits until rank 0 has entered. It reports all other ranks, and decides within every deadline.
void MonitoredBarrier::await_rank_0(std::uint32_t number, const Round& round) {
  const Header& rank_0 = state_.fabric().header(0);
  const std::function<std::string()> what = [this] {
    return concat("monitored_barrier (waiting for rank ", state_.fabric().number(0),
                  " to enter it)");
  };
  WaitWatchdog watchdog(state_, what, round.deadline, round.idle, round.interrupt, round.begin);
  watchdog.look_at_awaited_only();
  const auto entered = [&] {
    return rank_0.verdict.has(barrier::verdict_on(number)) ||
           rank_0.present.read() == 2 * number + 1;
  };
  try {
    wait_until(state_.header().doorbell, state_.patience(), watchdog, entered, [] { return 0; });
  } catch (const Error& error) {
    // Rank 0 may have entered while this rank composed its error: then rank 0 decides.
    if (error.kind() != ErrorKind::kTimeout || !entered()) throw;
  }
}

/// Waits for rank 0's verdict. Rank 0 has published how long it waits; its verdict has kGrace
/// beyond that, unless the rank is stopped and stays so: a tool may stop it for a moment to inspect
/// it.
void MonitoredBarrier::await_verdict(std::uint32_t number, const Round& round) {
  const Fabric& fabric = state_.fabric();
  const Header& rank_0 = fabric.header(0);
  const std::int64_t ends =
      std::min(rank_0.barrier_ends_ns.read(), state_.header().barrier_ends_ns.read());
  const auto left = std::chrono::nanoseconds(ends - now_ns());
  const Clock::time_point end =
      deadline_in(Clock::now(), std::chrono::ceil<std::chrono::milliseconds>(left));
  const std::function<std::string()> what = [] { return std::string("monitored_barrier"); };
  const auto wait = [&](Clock::duration grace, const auto& ready) {
    WaitWatchdog watchdog(state_, what, end, round.idle, round.interrupt, round.begin, {}, grace);
    watchdog.look_at_awaited_only();
    wait_until(state_.header().doorbell, state_.patience(), watchdog, ready,
               [&] { return Clock::now() < end ? awaited_beside_rank_0() : 0; });
  };
  const auto decided = [&] { return rank_0.verdict.has(barrier::verdict_on(number)); };
  Clock::time_point runs = end;  // when it was last seen running
  const auto has_stopped = [&] {
    const Clock::time_point now = Clock::now();
    if (now < end || !fabric.has_stopped(0)) runs = now;
    return now - runs >= barrier::kStopped;
  };
  wait(barrier::kGrace, [&] { return decided() || has_stopped(); });
  wait({}, decided);
}

}  // namespace dreamcomm

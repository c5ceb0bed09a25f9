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

// Rarely more than one thread of a rank is here: the wait need not be clever.
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

/// Goes on to the roll call that is next for the others, if this rank left some out.
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

/// The collectives that a peer had issued when it left roll call `number`, if this rank has issued
/// more by now: then it left that one out. One of long ago, too.
std::optional<std::int64_t> MonitoredBarrier::calls_beyond(std::uint32_t number,
                                                           std::int64_t issued) const {
  for (int rank = 0; rank < state_.size(); ++rank) {
    Header& peer = state_.fabric().header(rank);
    std::uint32_t ahead = barrier::ended(peer.present) - number;  // read before its calls
    // Rank 0's verdict comes before it leaves.
    const bool judged = rank == 0 && peer.verdict.has(barrier::verdict_on(number));
    if (ahead == 0 && judged) ahead = 1;
    if (!reached(ahead, 1)) continue;
    const std::int64_t calls = barrier::calls_at(peer, number).read();
    if (ahead > peer.monitored_barriers.size()) return std::min(calls, issued - 1);
    if (issued > calls) return calls;
  }
  return std::nullopt;
}

/// In the roll call that rank 0 is in.
bool MonitoredBarrier::is_present(int rank) const {
  return barrier::present(state_, rank).read() == state_.header().present.read();
}

/// A rank that is not in the roll call and might still come; else rank 0, who decides.
int MonitoredBarrier::awaited_beside_rank_0() const {
  if (!why_gone(state_.fabric(), 0).empty()) return 0;
  for (int rank = 1; rank < state_.size(); ++rank) {
    if (!is_present(rank) && why_gone(state_.fabric(), rank).empty()) return rank;
  }
  return 0;
}

/// Of roll call `number`, which rank 0 has ended; `late`: before this rank came. Throws Error
/// unless it passed.
void MonitoredBarrier::heed_verdict(std::uint32_t number, bool late) const {
  const Header& caller = state_.fabric().header(0);
  if (caller.passed.read() == number + 1) return;
  const std::uint32_t verdict = caller.verdict.read();
  const auto& text = caller.verdict_text[number % 2];
  const std::string problem(text.begin(), std::find(text.begin(), text.end(), '\0'));
  // Else rank 0 has ended others since, and the text may be theirs, or half of it.
  const bool own = (verdict & ~barrier::kBits) == barrier::verdict_on(number) &&
                   caller.verdict.read() == verdict;
  const std::string dead = own ? "" : words_on_lost(state_);
  const std::string lost = dead.empty() ? "" : "; " + dead;
  const bool ended = own ? (verdict & barrier::kEnded) != 0 : !dead.empty();
  const ErrorKind kind = ended ? ErrorKind::kPeerLost : ErrorKind::kTimeout;
  // Then the words are of all ranks of this host, in time or not.
  if (own && (verdict & barrier::kMissed) != 0) throw Error(kind, problem);
  const std::string who = concat("monitored_barrier on ", state_.who());
  if (late) {
    throw Error(kind, concat(who, " came too late: rank ", state_.fabric().number(0),
                             " has ended it without this rank",
                             own ? concat(": ", problem) : concat(", and others since", lost)));
  }
  check(own, kind, who, " was ended by rank ", state_.fabric().number(0),
        ", and others since, before this rank could hear why", lost);
  throw Error(kind,
              kind == ErrorKind::kTimeout ? problem : concat(who, " cannot finish: ", problem));
}

void MonitoredBarrier::answer(const Round& round) {
  catch_up(round.terms.issued);
  const std::uint32_t number = barrier::ended(state_.header().present);
  // Before rank 0 can see this one present, and let all pass.
  const bool late = state_.fabric().header(0).verdict.has(barrier::verdict_on(number));
  const barrier::Presence presence(state_, round.terms);
  if (!late) {
    await_caller(number, round);
    await_verdict(number, round);
  }
  heed_verdict(number, late);
}

/// Rank 0 tells of all others. Once it is there it decides within every deadline.
void MonitoredBarrier::await_caller(std::uint32_t number, const Round& round) {
  const Header& caller = state_.fabric().header(0);
  const std::function<std::string()> what = [this] {
    return concat("monitored_barrier (waiting for rank ", state_.fabric().number(0),
                  " to call the roll)");
  };
  WaitWatchdog watchdog(state_, what, round.deadline, round.idle, round.interrupt, round.begin);
  watchdog.look_at_awaited_only();
  const auto has_come = [&] {
    return caller.verdict.has(barrier::verdict_on(number)) ||
           caller.present.read() == 2 * number + 1;
  };
  try {
    wait_until(state_.header().doorbell, state_.patience(), watchdog, has_come, [] { return 0; });
  } catch (const Error& error) {
    // While this rank found its words rank 0 may have come: then it judges.
    if (error.kind() != ErrorKind::kTimeout || !has_come()) throw;
  }
}

/// Rank 0 has said how long it waits, and kGrace is for its answer, unless it is and stays stopped:
/// a tool may stop it for a moment to look at it.
void MonitoredBarrier::await_verdict(std::uint32_t number, const Round& round) {
  const Fabric& fabric = state_.fabric();
  const Header& caller = fabric.header(0);
  const std::int64_t ends =
      std::min(caller.barrier_ends_ns.read(), state_.header().barrier_ends_ns.read());
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
  const auto decided = [&] { return caller.verdict.has(barrier::verdict_on(number)); };
  Clock::time_point runs = end;  // when it was last seen to
  const auto has_stopped = [&] {
    const Clock::time_point now = Clock::now();
    if (now < end || !fabric.has_stopped(0)) runs = now;
    return now - runs >= barrier::kStopped;
  };
  wait(barrier::kGrace, [&] { return decided() || has_stopped(); });
  wait({}, decided);
}

}  // namespace dreamcomm

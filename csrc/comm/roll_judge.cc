// Rank 0's part of a monitored barrier: who is missing, and whether to wait for them.
#include <algorithm>

#include "comm/guard.h"
#include "comm/roll_call.h"
#include "comm/roll_flags.h"
#include "core/text.h"

namespace dreamcomm {

namespace {

constexpr std::chrono::milliseconds kRest{500};  // to come, once it is known that one cannot

std::chrono::milliseconds since(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
}

}  // namespace

bool RollCall::has_given_up(int rank) const {
  const std::uint32_t value = roll::present(member_, rank).read();  // once: it may come meanwhile
  const std::uint32_t own = member_.header().present.read();
  return value != own && reached(value, own);
}

bool RollCall::all_present() const {
  for (int rank = 1; rank < member_.size(); ++rank) {
    if (!is_present(rank)) return false;
  }
  return true;
}

/// A rank for which nobody need wait longer, though some have not come: it will not come, or it has
/// and its time is over; or -1.
int RollCall::ender() const {
  for (int rank = 1; rank < member_.size(); ++rank) {
    if (has_given_up(rank) || is_time_over(rank)) return rank;
  }
  return -1;
}

/// Of one that is in it: what is read before it came is the end of an earlier one.
bool RollCall::is_time_over(int rank) const {
  return is_present(rank) && now_ns() >= member_.fabric().header(rank).roll_ends_ns.read();
}

/// A rank that has gone, present or not, or the foremost of the absent ones, or -1.
int RollCall::awaited() const {
  std::vector<int> absent;
  for (int rank = member_.size() - 1; rank > 0; --rank) {
    if (!why_gone(member_.fabric(), rank).empty()) return rank;
    if (!is_present(rank)) absent.insert(absent.begin(), rank);
  }
  return absent.empty() ? -1 : foremost(absent);
}

/// Whether a rank is not in it that will not come.
bool RollCall::lacks_the_gone() const {
  for (int rank = 1; rank < member_.size(); ++rank) {
    if (!is_present(rank) && !why_gone(member_.fabric(), rank).empty()) return true;
  }
  return false;
}

/// One that has gone, or one that has given this roll call up, or the first.
int RollCall::foremost(const std::vector<int>& absent) const {
  const auto find = [&](const auto& is_so) {
    return std::find_if(absent.rbegin(), absent.rend(), is_so);
  };
  auto found = find([&](int rank) { return !why_gone(member_.fabric(), rank).empty(); });
  if (found == absent.rend()) found = find([&](int rank) { return has_given_up(rank); });
  return found == absent.rend() ? absent.front() : *found;
}

/// Who calls the roll looks at the clock itself, and asks the missing once: so the guard's is never
/// over, also where this process was stopped until long after.
void RollCall::watch(const Round& round, const std::function<bool()>& ready,
                     const std::function<int()>& blocker) {
  const std::function<std::string()> what = [] { return std::string("monitored_barrier"); };
  Guard guard(member_, what, round.deadline, round.idle, round.interrupt, round.begin, {},
              Clock::duration::max());
  guard.look_at_awaited_only();
  wait_until(member_.header().doorbell, member_.patience(), guard, ready, blocker);
  if (!all_present()) guard.look(-1);  // they may have left as this rank has given the group up
}

/// Where all of the missing are to be named: there may be more than the one that cannot come.
void RollCall::await_rest(const Round& round) {
  if (!round.terms.all) return;
  const Clock::time_point until = std::min(round.deadline, Clock::now() + kRest);
  const auto over = [&] {
    bool is_over = all_present() || Clock::now() >= until;
    for (int rank = 1; rank < member_.size(); ++rank) is_over = is_over || is_time_over(rank);
    return is_over;
  };
  watch(round, over, [] { return -1; });
}

/// Waits for all. Throws Error where rank 0 is ended itself.
RollCall::Outcome RollCall::count(const Round& round) {
  bool complete = false;
  int rank = -1;
  const auto over = [&] {
    complete = all_present();
    if (!complete) rank = ender();
    return complete || rank >= 0 || Clock::now() >= round.deadline;
  };
  try {
    watch(round, over, [&] { return awaited(); });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    const int gone = awaited();
    if (gone < 0 || is_present(gone)) return {roll::kEnded, error.what()};  // it had come
    await_rest(round);
    return {roll::kEnded, missing(since(round.begin), round.terms.all)};
  }
  if (complete) return {};
  const bool waited = rank >= 0 && is_present(rank);
  if (rank >= 0 && !waited) await_rest(round);
  const auto lasted = rank < 0 ? round.terms.timeout : since(round.begin);
  Outcome found{lacks_the_gone() ? roll::kEnded : roll::kLate, missing(lasted, round.terms.all)};
  if (waited && !found.problem.empty()) {
    found.problem += concat("; the timeout of rank ", rank, " was over");
  }
  return found;
}

void RollCall::call(const Round& round) {
  catch_up(round.terms.issued);
  const roll::Presence presence(member_, round.terms);
  Outcome found;
  try {
    found = count(round);
  } catch (const Error& error) {
    give_verdict({roll::kEnded, error.what()}, round.terms);
    throw;
  } catch (...) {
    give_verdict({roll::kEnded, "rank 0 was interrupted in it"}, round.terms);
    throw;
  }
  if (found.problem.empty()) found.bits = 0;  // the last one just came
  give_verdict(found, round.terms);
  const bool ended = (found.bits & roll::kEnded) != 0;
  check(found.bits == 0, ended ? ErrorKind::kPeerLost : ErrorKind::kTimeout, found.problem);
}

std::string RollCall::missing(std::chrono::milliseconds waited, bool all) const {
  std::vector<int> ranks;
  for (int rank = 1; rank < member_.size(); ++rank) {
    if (!is_present(rank)) ranks.push_back(rank);
  }
  if (ranks.empty()) return "";
  if (!all) ranks = {foremost(ranks)};
  const Fabric& fabric = member_.fabric();
  for (const int rank : ranks) {
    if (why_gone(fabric, rank).empty()) member_.inquire(rank);
  }
  const Clock::time_point until = Member::answer_until(waited);
  std::string names;
  std::string acts;
  for (const int rank : ranks) {
    const std::string gone = why_gone(fabric, rank);
    names += concat(names.empty() ? "" : ", ", rank);
    acts += gone.empty() ? "; " : concat("; ", gone, "; ");
    if (gone.empty() && has_given_up(rank)) acts += concat("rank ", rank, " has given it up; ");
    acts += concat("rank ", rank, ' ',
                   gone.empty() ? member_.does(rank, until) : member_.last_act(rank));
  }
  return concat(ranks.size() == 1 ? "Rank " : "Ranks ", names,
                " failed to pass monitoredBarrier in ", waited.count(), " ms (group seen from ",
                member_.who(), ")", acts);
}

/// Of the roll call that rank 0 is in.
void RollCall::give_verdict(const Outcome& found, const Terms& terms) {
  Header& header = member_.header();
  const std::uint32_t number = roll::ended(header.present);
  roll::calls_at(header, number).set(terms.issued);
  if (found.bits == 0) header.passed.publish(number + 1);
  put_text(header.verdict_text[number % 2], found.problem);
  header.verdict.publish(roll::verdict_on(number) + found.bits);
  member_.ring_peers();
}

}  // namespace dreamcomm

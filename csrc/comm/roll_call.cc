#include "comm/roll_call.h"

#include <algorithm>
#include <thread>

#include "comm/guard.h"
#include "core/text.h"

namespace dreamcomm {
namespace {

constexpr std::chrono::seconds kGrace{10};
constexpr std::chrono::milliseconds kRest{500};  // to come, once it is known that one cannot
// The lowest bits of a verdict:
constexpr std::uint32_t kLate = 1;   // somebody has not come
constexpr std::uint32_t kEnded = 2;  // nor will, or rank 0 gave it up
constexpr std::uint32_t kBits = kLate | kEnded;
constexpr std::uint32_t kOne = kBits + 1;  // of a verdict's number

std::chrono::milliseconds since(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
}

Flag& present(const Member& member, int rank) { return member.fabric().header(rank).present; }

/// The end of `timeout` from now on the clock of now_ns().
std::int64_t ends_ns(std::chrono::milliseconds timeout) {
  constexpr std::chrono::hours kLong(24 * 365 * 100);
  return now_ns() +
         std::chrono::nanoseconds(std::min<std::chrono::milliseconds>(timeout, kLong)).count();
}

/// How many roll calls a rank has left.
std::uint32_t ended(const Flag& present) { return present.read() / 2; }

/// Whether rank 0 has ended roll call `number`.
bool is_decided(const Header& caller, std::uint32_t number) {
  return reached(caller.verdict.read(), (number + 1) * kOne);
}

/// Holds the rank's presence odd while it lives.
class Presence {
 public:
  Presence(Member& member, const RollCall::Terms& terms) : header_(member.header()), terms_(terms) {
    header_.roll_ends_ns.set(ends_ns(terms.timeout));
    header_.roll_began_ns.set(now_ns());
    if (header_.progress.inside.read() == 0) header_.progress.waiting_for.set(-1);
    header_.present.take();
    member.ring_peers();
  }
  ~Presence() {
    header_.roll_calls.set(terms_.issued);  // for rank 0 already there
    header_.present.take();
  }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

 private:
  Header& header_;
  const RollCall::Terms& terms_;
};

}  // namespace

RollCall::RollCall(Member& member) : member_(member) {}

void RollCall::hold(const Terms& terms, const std::function<void()>& idle,
                    const std::function<void()>& interrupt) {
  member_.check_usable("monitored_barrier");
  const std::unique_lock<std::mutex> lock = take_turn(terms.timeout, idle, interrupt);
  if (member_.rank() == 0) {
    call(terms, idle, interrupt);
  } else {
    answer(terms, idle, interrupt);
  }
}

// Rarely more than one thread of a rank is here: the wait need not be clever.
std::unique_lock<std::mutex> RollCall::take_turn(std::chrono::milliseconds timeout,
                                                 const std::function<void()>& idle,
                                                 const std::function<void()>& interrupt) {
  const Clock::time_point deadline = deadline_in(Clock::now(), timeout);
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  while (!lock.owns_lock()) {
    check(Clock::now() < deadline, ErrorKind::kTimeout, "monitored_barrier on ", member_.who(),
          " reached its timeout while another thread of this rank was in one");
    if (idle) idle();
    if (interrupt) interrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (lock.try_lock()) break;
  }
  return lock;
}

/// Where a peer has `ended` more roll calls than this rank, the last of them with `by_calls`
/// collectives issued, and this rank has issued more: it left them out.
void RollCall::skip_to(std::uint32_t ended, std::int64_t by_calls, std::int64_t issued) {
  Flag& own = member_.header().present;
  if (issued > by_calls && !reached(own.read(), 2 * ended)) own.publish(2 * ended);
}

/// In the roll call that rank 0 is in.
bool RollCall::is_present(int rank) const {
  return present(member_, rank).read() == member_.header().present.read();
}

bool RollCall::has_given_up(int rank) const {
  const std::uint32_t value = present(member_, rank).read();  // once: it may come meanwhile
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
  const std::int64_t now = now_ns();
  for (int rank = 1; rank < member_.size(); ++rank) {
    const std::int64_t ends = member_.fabric().header(rank).roll_ends_ns.read();
    if (has_given_up(rank) || (is_present(rank) && now >= ends)) return rank;
  }
  return -1;
}

/// A rank that has gone, or one that has given this roll call up, or the first absent one.
int RollCall::awaited() const {
  int first = -1;
  int unwilling = -1;
  for (int rank = member_.size() - 1; rank > 0; --rank) {
    if (!why_gone(member_.fabric(), rank).empty()) return rank;
    if (is_present(rank)) continue;
    first = rank;
    if (has_given_up(rank)) unwilling = rank;
  }
  return unwilling >= 0 ? unwilling : first;
}

/// Waits for all. Throws Error where rank 0 is ended itself.
RollCall::Outcome RollCall::count(const Terms& terms, const std::function<void()>& idle,
                                  const std::function<void()>& interrupt) {
  const std::function<std::string()> what = [] { return std::string("monitored_barrier"); };
  const Clock::time_point begin = Clock::now();
  const Clock::time_point deadline = deadline_in(begin, terms.timeout);
  const auto wait = [&](Clock::time_point until, const auto& ready, const auto& blocker) {
    Guard guard(member_, what, until, idle, interrupt, begin);
    guard.look_at_awaited_only();
    wait_until(member_.header().doorbell, member_.patience(), guard, ready, blocker);
  };
  const auto rest = [&] {  // there may be more than the one that cannot come
    if (!terms.all) return;
    const Clock::time_point until = std::min(deadline, Clock::now() + kRest);
    const auto over = [&] { return all_present() || Clock::now() >= until; };
    wait(deadline, over, [] { return -1; });
  };
  try {
    wait(deadline, [&] { return all_present() || ender() >= 0; }, [&] { return awaited(); });
    if (all_present()) return {};
    const int rank = ender();
    const bool waited = rank >= 0 && is_present(rank);
    if (!waited) rest();
    const std::string problem = missing(since(begin), terms.all);
    if (problem.empty() || !waited) return {kLate, problem};
    return {kLate, concat(problem, "; the timeout of rank ", rank, " was over")};
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) return {kLate, missing(terms.timeout, terms.all)};
    if (error.kind() != ErrorKind::kPeerLost) throw;
    const int gone = awaited();
    if (gone < 0 || is_present(gone)) return {kEnded, error.what()};  // it had come
  }
  rest();
  return {kEnded, missing(since(begin), terms.all)};
}

void RollCall::call(const Terms& terms, const std::function<void()>& idle,
                    const std::function<void()>& interrupt) {
  for (int rank = 1; rank < member_.size(); ++rank) {
    const Header& peer = member_.fabric().header(rank);
    skip_to(ended(peer.present), peer.roll_calls.read(), terms.issued);
  }
  const Presence presence(member_, terms);
  Outcome found;
  try {
    found = count(terms, idle, interrupt);
  } catch (const Error& error) {
    give_verdict({kEnded, error.what()}, terms);
    throw;
  } catch (...) {
    give_verdict({kEnded, "rank 0 was interrupted in it"}, terms);
    throw;
  }
  if (found.problem.empty()) found.bits = 0;  // the last one just came
  give_verdict(found, terms);
  const bool ended = (found.bits & kEnded) != 0;
  check(found.bits == 0, ended ? ErrorKind::kPeerLost : ErrorKind::kTimeout, found.problem);
}

std::string RollCall::missing(std::chrono::milliseconds waited, bool all) const {
  std::vector<int> ranks;
  for (int rank = 1; rank < member_.size(); ++rank) {
    if (!is_present(rank)) ranks.push_back(rank);
  }
  if (ranks.empty()) return "";
  if (!all) ranks = {awaited()};
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
  header.roll_calls.set(terms.issued);
  put_text(header.verdict_text, found.problem);
  header.verdict.publish((ended(header.present) + 1) * kOne + found.bits);
  member_.ring_peers();
}

/// A rank that is not in the roll call and might still come; else rank 0, who decides.
int RollCall::awaited_beside_rank_0() const {
  for (int rank = 1; rank < member_.size(); ++rank) {
    if (!is_present(rank) && why_gone(member_.fabric(), rank).empty()) return rank;
  }
  return 0;
}

void RollCall::answer(const Terms& terms, const std::function<void()>& idle,
                      const std::function<void()>& interrupt) {
  const Header& caller = member_.fabric().header(0);
  skip_to(caller.verdict.read() / kOne, caller.roll_calls.read(), terms.issued);
  const std::uint32_t number = ended(member_.header().present);
  const auto decided = [&] { return is_decided(caller, number); };
  const bool late = decided();  // before rank 0 can see this one present, and let all pass
  const Presence presence(member_, terms);
  check(!late, ErrorKind::kTimeout, "monitored_barrier on ", member_.who(),
        " came too late: rank 0 has ended it without this rank; the next one of all ranks goes "
        "together again");
  const std::function<std::string()> what = [] { return std::string("monitored_barrier"); };
  const std::function<std::string()> what_waits = [] {
    return std::string("monitored_barrier (waiting for rank 0 to call the roll)");
  };
  // Rank 0 tells of all others. Once it is there it decides within every deadline.
  Guard coming(member_, what_waits, deadline_in(Clock::now(), terms.timeout), idle, interrupt);
  coming.look_at_awaited_only();
  wait_until(
      member_.header().doorbell, member_.patience(), coming,
      [&] { return decided() || caller.present.read() == 2 * number + 1; }, [] { return 0; });
  // Unless it is stopped: it has said how long it waits, and kGrace is for its answer.
  const std::int64_t ends =
      std::min(caller.roll_ends_ns.read(), member_.header().roll_ends_ns.read());
  const auto left = std::chrono::nanoseconds(ends - now_ns());
  const Clock::time_point end =
      deadline_in(Clock::now(), std::chrono::ceil<std::chrono::milliseconds>(left));
  Guard deciding(member_, what, end, idle, interrupt, Clock::now(), {}, kGrace);
  deciding.look_at_awaited_only();
  wait_until(member_.header().doorbell, member_.patience(), deciding, decided,
             [&] { return awaited_beside_rank_0(); });
  const std::uint32_t verdict = caller.verdict.read() & kBits;
  const char* const text = caller.verdict_text.data();
  check((verdict & kEnded) == 0, ErrorKind::kPeerLost, "monitored_barrier on ", member_.who(),
        " cannot finish: ", text);
  check(verdict == 0, ErrorKind::kTimeout, text);
}

}  // namespace dreamcomm

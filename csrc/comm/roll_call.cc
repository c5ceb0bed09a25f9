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

/// Holds the rank's presence odd while it lives.
class Presence {
 public:
  explicit Presence(Flag& flag) : flag_(flag) { flag_.take(); }
  ~Presence() { flag_.take(); }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

 private:
  Flag& flag_;
};

}  // namespace

RollCall::RollCall(Member& member)
    : member_(member), counted_(static_cast<std::size_t>(member.size()), 0) {}

void RollCall::hold(std::chrono::milliseconds timeout, bool all, const std::function<void()>& idle,
                    const std::function<void()>& interrupt) {
  member_.check_usable("monitored_barrier");
  const std::unique_lock<std::mutex> lock = take_turn(timeout, idle, interrupt);
  if (member_.rank() == 0) {
    call(timeout, all, idle, interrupt);
  } else {
    answer(timeout, idle, interrupt);
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

bool RollCall::is_present(int rank) const {
  const std::uint32_t value = present(member_, rank).read();
  return rank == 0 || (value % 2 == 1 && value != counted_[static_cast<std::size_t>(rank)]);
}

/// `looks`: at whoever is awaited; or only at the deadline.
void RollCall::await_all(Guard& guard, bool looks) {
  wait_until(
      member_.header().doorbell, member_.patience(), guard,
      [&] {
        for (int rank = 1; rank < member_.size(); ++rank) {
          if (!is_present(rank)) return false;
        }
        return true;
      },
      [&] { return looks ? awaited() : -1; });
}

/// Of the absent ranks one that cannot come, or the first.
int RollCall::awaited() const {
  int first = -1;
  for (int rank = member_.size() - 1; rank > 0; --rank) {
    if (is_present(rank)) continue;
    first = rank;
    if (!why_gone(member_.fabric(), rank).empty()) return rank;
  }
  return first;
}

/// Waits for all. Throws Error where rank 0 is ended itself.
RollCall::Outcome RollCall::count(std::chrono::milliseconds timeout, bool all,
                                  const std::function<void()>& idle,
                                  const std::function<void()>& interrupt) {
  const std::function<std::string()> what = [] { return std::string("monitored_barrier"); };
  const Clock::time_point begin = Clock::now();
  const Clock::time_point deadline = deadline_in(begin, timeout);
  const auto wait = [&](Clock::time_point until, bool looks) {
    Guard guard(member_, what, until, idle, interrupt, begin);
    await_all(guard, looks);
  };
  Outcome found;
  try {
    wait(deadline, true);
    return {};
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) return {kLate, missing(timeout, all)};
    if (error.kind() != ErrorKind::kPeerLost) throw;
    found = {kEnded, error.what()};
  }
  const int absent = awaited();
  // Else one has ended that had come.
  if (absent < 0 || why_gone(member_.fabric(), absent).empty()) return found;
  try {
    if (all) wait(std::min(deadline, Clock::now() + kRest), false);  // there may be more
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
  }
  return {kEnded, missing(since(begin), all)};
}

void RollCall::call(std::chrono::milliseconds timeout, bool all, const std::function<void()>& idle,
                    const std::function<void()>& interrupt) {
  member_.header().roll_ends_ns.set(ends_ns(timeout));
  const Presence presence(member_.header().present);
  member_.ring_peers();
  Outcome found;
  try {
    found = count(timeout, all, idle, interrupt);
  } catch (const Error& error) {
    give_verdict({kEnded, error.what()});
    throw;
  } catch (...) {
    give_verdict({kEnded, "rank 0 was interrupted in it"});
    throw;
  }
  for (int rank = 1; rank < member_.size(); ++rank) {
    if (is_present(rank)) counted_[static_cast<std::size_t>(rank)] = present(member_, rank).read();
  }
  if (found.problem.empty()) found.bits = 0;  // the last one just came
  give_verdict(found);
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
    acts += concat("rank ", rank, ' ',
                   gone.empty() ? member_.does(rank, until) : member_.last_act(rank));
  }
  return concat(ranks.size() == 1 ? "Rank " : "Ranks ", names,
                " failed to pass monitoredBarrier in ", waited.count(), " ms (group seen from ",
                member_.who(), ")", acts);
}

void RollCall::give_verdict(const Outcome& found) {
  Header& header = member_.header();
  put_text(header.verdict_text, found.problem);
  header.verdict.publish(((header.verdict.read() | kBits) + 1) | found.bits);
  member_.ring_peers();
}

/// A rank that is not in the roll call and might still come; else rank 0, who decides.
int RollCall::awaited_beside_rank_0() const {
  for (int rank = 1; rank < member_.size(); ++rank) {
    const bool absent = rank != member_.rank() && present(member_, rank).read() % 2 == 0;
    if (absent && why_gone(member_.fabric(), rank).empty()) return rank;
  }
  return 0;
}

void RollCall::answer(std::chrono::milliseconds timeout, const std::function<void()>& idle,
                      const std::function<void()>& interrupt) {
  const Header& caller = member_.fabric().header(0);
  const std::uint32_t before = caller.verdict.read();
  const Presence presence(member_.header().present);
  member_.ring_peers();
  const std::function<std::string()> what = [] { return std::string("monitored_barrier"); };
  const std::function<std::string()> what_waits = [] {
    return std::string("monitored_barrier (waiting for rank 0 to call the roll)");
  };
  const auto decided = [&] { return caller.verdict.read() != before; };
  // The deadline is for rank 0 to come. Once it is there it decides within its
  // own deadline, and this rank must still be present then.
  Guard coming(member_, what_waits, deadline_in(Clock::now(), timeout), idle, interrupt);
  wait_until(
      member_.header().doorbell, member_.patience(), coming,
      [&] { return decided() || caller.present.read() % 2 == 1; }, [] { return 0; });
  // Unless it is stopped: it has said how long it waits, and kGrace is for its answer.
  const auto left = std::chrono::nanoseconds(caller.roll_ends_ns.read() - now_ns());
  const Clock::time_point end =
      deadline_in(Clock::now(), std::chrono::ceil<std::chrono::milliseconds>(left));
  Guard deciding(member_, what, end, idle, interrupt, Clock::now(), {}, kGrace);
  wait_until(member_.header().doorbell, member_.patience(), deciding, decided,
             [&] { return awaited_beside_rank_0(); });
  const std::uint32_t verdict = caller.verdict.read() & kBits;
  const char* const text = caller.verdict_text.data();
  check((verdict & kEnded) == 0, ErrorKind::kPeerLost, "monitored_barrier on ", member_.who(),
        " cannot finish: ", text);
  check(verdict == 0, ErrorKind::kTimeout, text);
}

}  // namespace dreamcomm

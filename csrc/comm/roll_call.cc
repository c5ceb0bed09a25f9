#include "comm/roll_call.h"

#include <algorithm>
#include <thread>

#include "comm/guard.h"
#include "core/text.h"

namespace dreamcomm {
namespace {

constexpr std::chrono::seconds kGrace{10};
constexpr std::uint32_t kMissing = 1;  // the lowest bit of a verdict

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

void RollCall::call(std::chrono::milliseconds timeout, bool all, const std::function<void()>& idle,
                    const std::function<void()>& interrupt) {
  const std::function<std::string()> what = [] { return std::string("monitored_barrier"); };
  Guard guard(member_, what, deadline_in(Clock::now(), timeout), idle, interrupt);
  member_.header().roll_ends_ns.set(ends_ns(timeout));
  const Presence presence(member_.header().present);
  member_.ring_peers();
  std::string problem;
  try {
    // The absence of a rank that has ended is for the deadline to tell: it is
    // one of the missing, and there may be more.
    wait_until(
        member_.header().doorbell, member_.patience(), guard,
        [&] {
          for (int rank = 1; rank < member_.size(); ++rank) {
            if (!is_present(rank)) return false;
          }
          return true;
        },
        [] { return -1; });
  } catch (const Error& error) {
    const bool late = error.kind() == ErrorKind::kTimeout;
    problem = late ? missing(timeout, all) : error.what();  // empty: the last one just came
    if (!late) give_verdict(problem);
    if (!late) throw;
  } catch (...) {
    give_verdict("rank 0 was interrupted in monitored_barrier");
    throw;
  }
  for (int rank = 1; rank < member_.size(); ++rank) {
    if (is_present(rank)) counted_[static_cast<std::size_t>(rank)] = present(member_, rank).read();
  }
  give_verdict(problem);
  check(problem.empty(), ErrorKind::kTimeout, problem);
}

std::string RollCall::missing(std::chrono::milliseconds timeout, bool all) const {
  for (int rank = 1; all && rank < member_.size(); ++rank) {
    if (!is_present(rank)) member_.inquire(rank);
  }
  const Clock::time_point until = Member::answer_until(timeout);
  std::string ranks;
  std::string acts;
  int count = 0;
  for (int rank = 1; rank < member_.size(); ++rank) {
    if (is_present(rank)) continue;
    if (count > 0 && !all) break;
    ranks += concat(count > 0 ? ", " : "", rank);
    acts += concat("; rank ", rank, ' ', member_.does(rank, until));
    ++count;
  }
  if (count == 0) return "";
  return concat(count == 1 ? "Rank " : "Ranks ", ranks, " failed to pass monitoredBarrier in ",
                timeout.count(), " ms (group seen from ", member_.who(), ")", acts);
}

void RollCall::give_verdict(const std::string& problem) {
  Header& header = member_.header();
  put_text(header.verdict_text, problem);
  const std::uint32_t next = (header.verdict.read() | kMissing) + 1;  // even
  header.verdict.publish(problem.empty() ? next : next | kMissing);
  member_.ring_peers();
}

void RollCall::answer(std::chrono::milliseconds timeout, const std::function<void()>& idle,
                      const std::function<void()>& interrupt) {
  const Header& caller = member_.fabric().header(0);
  const std::uint32_t before = caller.verdict.read();
  const Presence presence(member_.header().present);
  member_.ring_peers();
  const std::function<std::string()> what = [] {
    return std::string("monitored_barrier (waiting for rank 0 to call the roll)");
  };
  const auto decided = [&] { return caller.verdict.read() != before; };
  // The deadline is for rank 0 to come. Once it is there it decides within its
  // own deadline, and this rank must still be present then.
  Guard coming(member_, what, deadline_in(Clock::now(), timeout), idle, interrupt);
  wait_until(
      member_.header().doorbell, member_.patience(), coming,
      [&] { return decided() || caller.present.read() % 2 == 1; }, [] { return 0; });
  // Unless it is stopped: it has said how long it waits, and kGrace is for its answer.
  const auto left = std::chrono::nanoseconds(caller.roll_ends_ns.read() - now_ns()) + kGrace;
  Guard deciding(member_, what,
                 deadline_in(Clock::now(), std::chrono::ceil<std::chrono::milliseconds>(left)),
                 idle, interrupt);
  wait_until(member_.header().doorbell, member_.patience(), deciding, decided, [] { return 0; });
  check((caller.verdict.read() & kMissing) == 0, ErrorKind::kTimeout, caller.verdict_text.data());
}

}  // namespace dreamcomm

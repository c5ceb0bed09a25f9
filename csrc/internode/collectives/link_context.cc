#include "internode/collectives/link_context.h"

#include <algorithm>
#include <utility>

#include "algorithms/primitives.h"
#include "core/error.h"
#include "internode/liveness/aborted_peers.h"
#include "internode/liveness/wait_scope.h"
#include "kernels/reduce.h"
#include "kernels/widen.h"

namespace dreamcomm {

namespace {

constexpr std::chrono::milliseconds kAsk{40};     // a moment for ranks that abort at the same time
constexpr std::chrono::milliseconds kAsked{300};  // includes the store's time
constexpr int kLooksApart = 6;                    // of the interrupter's ticks
constexpr std::chrono::milliseconds kLookRemote{100};  // nearly every wait is shorter
constexpr std::chrono::milliseconds kUntilTold{450};   // for the lost host's other ranks

constexpr const char* kHasAborted = "it has aborted the group";

}  // namespace

LinkContext::LinkContext(const Levels& levels, const Request& request, std::uint64_t number,
                         std::size_t chunk, const Interrupt& interrupt)
    : HierContext(levels.topology, levels.rank, chunk, levels.widens_halves),
      levels_(levels),
      request_(request),
      number_(number),
      interrupt_(interrupt) {}

/// INVARIANT: a late rank is reported first by its own host's ranks, at the deadline; then by ranks
/// that wait for it from other hosts; then by the ranks that wait for those. An in-host wait for a
/// rank that itself waits for another host is excused that long. The first of these ranks reports,
/// and the others pass its report on: all within a tenth of the timeout. Between hosts a rank
/// reports the rank it waits for before it queries that rank's report. So in a row of ranks that
/// wait for each other, each passes on the rank that the last one waits for.
Clock::duration LinkContext::slack() const {
  constexpr Clock::duration kLeast = std::chrono::milliseconds(150);
  return std::max((request_.deadline - begin_) / 30, kLeast);
}

void LinkContext::run_on_host(Kind kind, const Reduction& how, std::span<const Block> in,
                              std::span<const Block> out, int root) {
  Request part;
  part.kind = kind;
  part.reduction = how;
  part.in = in;
  part.out = out;
  part.root = root;
  run_here(part, interrupt_);
}

/// A death on another host, or an abort of a rank there, must be reported within a second even
/// while a rank of this host is late.
/// INVARIANT: a lost rank is reported only if, after it was found, a rank of this host is seen not
/// to have entered this gathering. Then the leader had not got that rank's part, so no rank
/// anywhere had returned from the call (call_handshake.cc).
void LinkContext::gather_on_host(std::span<const Block> in, std::span<const Block> out) {
  const Clock::time_point begin = Clock::now();
  Clock::time_point next = begin + kLookRemote;
  AbortedPeers aborted(levels_.causes, begin);
  const Interrupt look = [&] {
    if (interrupt_) interrupt_();
    if (Clock::now() < next) return;
    next = Clock::now() + kLookRemote;
    std::map<int, std::string> lost = levels_.monitor.lost();
    if (lost.empty()) {
      for (const int rank : aborted.among(remote_ranks(), request_.deadline)) {
        lost.emplace(rank, kHasAborted);
      }
    }
    if (lost.empty() || levels_.host.all_have_come()) return;
    fail_for_remote(lost.begin()->first, lost.begin()->second, Clock::now() - begin);
  };
  Request part;
  part.kind = Kind::kAllGather;
  part.in = in;
  part.out = out;
  run_here(part, look);
}

std::vector<int> LinkContext::remote_ranks() const {
  std::vector<int> ranks;
  for_other_hosts([&](int host) {
    const std::span<const int> of_host = topology().ranks(host);
    ranks.insert(ranks.end(), of_host.begin(), of_host.end());
  });
  return ranks;
}

void LinkContext::run_here(Request& part, const Interrupt& interrupt) {
  part.part_of = &request_;
  part.deadline = request_.deadline;
  if (part.deadline != Clock::time_point::max()) part.excuse = 2 * slack() + kAsked;
  try {
    levels_.host.run_part(part, interrupt);
  } catch (const Error& error) {
    levels_.call_failed->publish(1);
    // If no rank of this host has died, one has left cleanly (FailureCause).
    if (error.kind() != ErrorKind::kPeerLost || lost_remote_) throw;
    if (!levels_.host.lost().empty()) throw;
    throw Error(error.kind(), error.what() + levels_.causes.others());
  } catch (...) {
    levels_.call_failed->publish(1);
    throw;
  }
}

/// Reports a lost rank of another host, while a rank of this host has been waited for: that late
/// rank may be why the other has aborted.
void LinkContext::fail_for_remote(int rank, const std::string& failure, Clock::duration waited) {
  lost_remote_ = true;
  const std::string told = report_of_host(rank, kUntilTold);
  const std::string late = levels_.host.awaited(waited);
  throw Error(ErrorKind::kPeerLost,
              concat(describe(request_), " on ", levels_.host.who(), " cannot finish: rank ", rank,
                     " of ", topology().words(topology().host_of(rank)), ": ",
                     told.empty() ? failure + levels_.causes.others(rank) : told,
                     late.empty() ? "" : concat("; rank ", this->rank(), " waits for ", late)));
}

/// Why a rank has not sent, or taken, a message: by its own report, otherwise by its host's other
/// ranks, which abort the group at about the same time and know what it does.
std::string LinkContext::report_of_host(int rank, std::chrono::milliseconds moment) const {
  constexpr std::chrono::milliseconds kNone{0};
  const Clock::time_point until = Clock::now() + moment;
  while (true) {
    std::string told = levels_.reasons.of(rank, std::min(moment, kAsk));
    for (const int mate : topology().ranks(topology().host_of(rank))) {
      if (told.empty() && mate != rank) told = levels_.reasons.of(mate, kNone);
    }
    if (!told.empty() || Clock::now() >= until) return told;
  }
}

/// INVARIANT: peers of this host write into a room only until the call ends for which it was the
/// output, unless that fails.
Cargo LinkContext::allocate(std::size_t bytes) const {
  Cargo room = allocate_private(bytes);
  if (!levels_.heap || !levels_.heap->holds(room.data())) return room;
  const auto give_back = [own = room.memory, heap = levels_.heap,
                          call_failed = levels_.call_failed](std::byte* at) {
    if (call_failed->read() != 0) heap->retire(at);
  };
  return {std::shared_ptr<std::byte>(room.data(), give_back), 0, bytes};
}

/// Allocates a room that no peer writes into.
Cargo LinkContext::allocate_private(std::size_t bytes) const {
  std::shared_ptr<std::byte> memory = levels_.heap ? levels_.heap->allocate(bytes) : nullptr;
  if (!memory) memory = {new std::byte[bytes], std::default_delete<std::byte[]>()};
  return {std::move(memory), 0, bytes};
}

Cargo LinkContext::keep(const Block& block) {
  Cargo cargo = allocate(block.bytes);
  copy_bytes(cargo.data(), block.data, block.bytes);
  return cargo;
}

void LinkContext::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  copy_bytes(to, from, bytes);
}

Cargo LinkContext::widened(const TwoStepReduction& steps, std::byte* in, std::size_t count) {
  if (!steps.widens()) {
    return {std::shared_ptr<std::byte>(std::shared_ptr<void>(), in), 0, count * steps.item()};
  }
  Cargo wide = allocate(count * sizeof(float));
  kernels::widen(steps.type, in, reinterpret_cast<float*>(wide.data()), count);
  return wide;
}

void LinkContext::combine(const TwoStepReduction& steps, std::span<const std::byte* const> of_hosts,
                          std::byte* out, std::size_t count) {
  if (!steps.widens()) return reduce(steps.between, of_hosts, out, count);
  const Cargo wide = allocate(count * sizeof(float));
  reduce(steps.between, of_hosts, wide.data(), count);
  kernels::narrow(steps.type, reinterpret_cast<const float*>(wide.data()), out, count);
}

/// INVARIANT: messages of one direction between two ranks that may be under way together have
/// different tags. A call ends on a rank when its own messages have arrived or been taken over, and
/// ranks are at most one call apart: each waits for all hosts at the beginning of a call.
std::uint32_t LinkContext::tag(std::uint32_t number) const {
  constexpr std::uint32_t kPerCall = 16;  // bits
  const auto call = static_cast<std::uint32_t>(number_) << kPerCall;
  return (call | (number & ((1U << kPerCall) - 1))) & Link::kMostTag;
}

template <typename Begin>
std::shared_ptr<Parcel> LinkContext::begun(int rank, Begin&& begin) const {
  try {
    return begin();
  } catch (const Error& error) {
    fail_for(rank, error);
  }
}

void LinkContext::send(int rank, const Cargo& cargo, std::uint32_t number) {
  if (cargo.bytes > 0) send_as(rank, cargo, tag(number));
}

void LinkContext::send_as(int rank, const Cargo& cargo, std::uint32_t tag) {
  const auto begin = [&] { return levels_.link.send(rank, cargo, tag); };
  sends_.push_back({begun(rank, begin), rank});
  traffic_.sent += cargo.bytes;
}

void LinkContext::receive(int rank, const Cargo& cargo, std::uint32_t number) {
  if (cargo.bytes == 0) return;
  const auto begin = [&] { return levels_.link.receive(rank, cargo, tag(number)); };
  receives_.push_back({begun(rank, begin), rank});
  traffic_.received += cargo.bytes;
}

std::vector<Cargo> LinkContext::exchange_openings(const Cargo& mine, std::size_t most) {
  std::vector<Cargo> theirs(static_cast<std::size_t>(hosts()));
  for_other_hosts([&](int host) {
    const int leader = topology().rank_at(host, 0);
    PrepostedReceives::Expected one = levels_.envelopes.from(leader, [&](std::uint32_t tag) {
      const Cargo cargo = allocate_private(most);
      const auto begin = [&] { return levels_.link.receive(leader, cargo, tag); };
      return PrepostedReceives::Expected{cargo, begun(leader, begin)};
    });
    theirs[static_cast<std::size_t>(host)] = one.room;
    receives_.push_back({std::move(one.parcel), leader});
    traffic_.received += most;
    send_as(leader, mine, levels_.envelopes.tag());
  });
  levels_.envelopes.opened();
  return theirs;
}

LinkContext::Transfers LinkContext::sends() { return std::exchange(sends_, {}); }
LinkContext::Transfers LinkContext::receives() { return std::exchange(receives_, {}); }

void LinkContext::wait(const Transfers& transfers) {
  if (transfers.empty()) return;
  WaitScope awaiting(levels_.host.whole().calls, timeline_, noted_as_);
  std::size_t next = 0;  // of the transfers
  int looks = 0;
  AbortedPeers aborted(levels_.causes);
  const auto wait_on = [&] {
    for (; next < transfers.size(); ++next) {
      try {
        const auto& [parcel, rank] = transfers[next];
        const bool arrived = levels_.interrupter.wait(*parcel) ||
                             (++looks % kLooksApart == 0 && levels_.monitor.look(rank, *parcel));
        if (arrived) {
          awaiting.moved(rank);
          continue;
        }
        awaiting.lasts(rank);
        if (!aborted.among({&rank, 1}, request_.deadline).empty()) {
          throw Error(ErrorKind::kPeerLost, kHasAborted);
        }
        return false;
      } catch (const Error& error) {
        fail_for(transfers[next].rank, error);
      }
    }
    return true;
  };
  const std::function<std::string()> what = [&] { return waiting_for(transfers[next].rank); };
  try {
    levels_.host.wait_through(wait_on, what, {request_.deadline, slack(), warned_}, interrupt_);
    last_between_ = awaiting.last();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
    levels_.reasons.post_abort(this->rank(), error.what());
    const std::string told = report_of_host(transfers[next].rank, kAsk);
    if (told.empty()) throw;
    throw Error(ErrorKind::kTimeout, concat(error.what(), "; ", told));
  }
}

LastToCome LinkContext::last_here() const {
  LastToCome last = levels_.host.last_to_come();
  if (last.rank >= 0) last.rank = topology().rank_at(host(), last.rank);
  return last;
}

std::string LinkContext::waiting_for(int rank) const {
  return concat(describe(request_), ", in which rank ", this->rank(), " waits for rank ", rank,
                " of ", topology().words(topology().host_of(rank)), ",");
}

void LinkContext::fail_for(int rank, const Error& error) const {
  throw Error(error.kind(), concat(waiting_for(rank), " on ", levels_.host.who(),
                                   " cannot finish: ", levels_.causes.of(rank, error.what())));
}

}  // namespace dreamcomm

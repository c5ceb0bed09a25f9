#include "span/trip.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace dreamcomm {

Trip::Trip(const Levels& levels, const Request& request, std::uint64_t number,
           const Interrupt& interrupt)
    : levels_(levels), request_(request), number_(number), interrupt_(interrupt) {}

void Trip::here(Kind kind, const Reduction& how, std::span<const Block> in,
                std::span<const Block> out, int root) {
  run(kind, how, in, out, root, later(2));
}

void Trip::here_first(Kind kind, std::span<const Block> in, std::span<const Block> out) {
  run(kind, Reduction{}, in, out, 0, request_.deadline);
}

/// A late rank is missed by those of its host first; the other hosts' leaders miss that host, and
/// their hosts' ranks the leaders. Deadlines in that order let the first of these speak, and the
/// others pass its words on: all within a tenth of the timeout.
Clock::time_point Trip::later(int slacks) const {
  constexpr Clock::duration kLeast = std::chrono::milliseconds(150);
  if (request_.deadline == Clock::time_point::max()) return request_.deadline;
  const Clock::duration slack = std::max((request_.deadline - begin_) / 30, kLeast);
  return request_.deadline + slacks * slack;
}

void Trip::run(Kind kind, const Reduction& how, std::span<const Block> in,
               std::span<const Block> out, int root, Clock::time_point deadline) {
  Request part;
  part.kind = kind;
  part.reduction = how;
  part.in = in;
  part.out = out;
  part.root = root;
  part.deadline = deadline;
  levels_.host.run_ordered(part, interrupt_);
}

Cargo Trip::room(std::size_t bytes) const {
  std::shared_ptr<std::byte> memory = levels_.heap ? levels_.heap->allocate(bytes) : nullptr;
  if (!memory) memory = {new std::byte[bytes], std::default_delete<std::byte[]>()};
  return {std::move(memory), 0, bytes};
}

/// INVARIANT: messages of one direction between two ranks that may be under way together have
/// different tags. A call ends on a rank when its own messages have come or been taken over, and
/// ranks are at most one call apart: each waits for all hosts at the beginning of a call.
std::uint32_t Trip::tag(std::uint32_t number) const {
  constexpr std::uint32_t kPerCall = 16;  // bits
  const auto call = static_cast<std::uint32_t>(number_) << kPerCall;
  return (call | (number & ((1U << kPerCall) - 1))) & Link::kMostTag;
}

void Trip::send(int rank, const Cargo& cargo, std::uint32_t number) {
  if (cargo.bytes == 0) return;
  sends_.push_back({levels_.link.send(rank, cargo, tag(number)), rank});
  traffic_.sent += cargo.bytes;
}

void Trip::receive(int rank, const Cargo& cargo, std::uint32_t number) {
  if (cargo.bytes == 0) return;
  receives_.push_back({levels_.link.receive(rank, cargo, tag(number)), rank});
  traffic_.received += cargo.bytes;
}

Trip::Transfers Trip::sends() { return std::exchange(sends_, {}); }
Trip::Transfers Trip::receives() { return std::exchange(receives_, {}); }

void Trip::wait(const Transfers& transfers) {
  if (transfers.empty()) return;
  std::size_t come = 0;  // of them
  const auto wait_on = [&] {
    while (come < transfers.size()) {
      if (!levels_.nudger.wait(*transfers[come].parcel)) return false;
      ++come;
    }
    return true;
  };
  const std::function<std::string()> what = [&] {
    const int rank = transfers[come].rank;
    return concat(describe(request_), ", in which rank ", this->rank(), " waits for rank ", rank,
                  " of ", topology().words(topology().host_of(rank)), ",");
  };
  try {
    levels_.host.wait_through(wait_on, what, later(1), interrupt_);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost || come == transfers.size()) throw;
    throw Error(error.kind(),
                concat(what(), " cannot finish: ", why_lost(transfers[come].rank, error.what())));
  }
}

std::string Trip::why_lost(int rank, const std::string& what) const {
  const std::string told = levels_.told ? levels_.told(rank) : "";
  return told.empty() ? what : concat("rank ", rank, " has given the group up: ", told);
}

}  // namespace dreamcomm

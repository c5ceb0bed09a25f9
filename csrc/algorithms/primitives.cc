#include "algorithms/primitives.h"

#include <algorithm>
#include <bit>

#include "algorithms/table.h"
#include "core/counts.h"
#include "core/error.h"
#include "core/text.h"

namespace dreamcomm {

static_assert(sizeof(Opening) <= Primitives::kSignature);

Primitives::Primitives(Rounds& rounds, const Opening& opening, WaitObserver& observer,
                       Scratch& scratch, const Preference* preference, std::int64_t now_ns,
                       GradientCounts* counts)
    : rounds_(rounds),
      opening_(opening),
      observer_(observer),
      scratch_(scratch),
      preference_(preference),
      counts_(counts),
      arrival_(now_ns, rounds.rank()) {
  opening_.past = scratch_.writer.wishes();
  opening_.entered = static_cast<std::uint64_t>(now_ns) & Arrival::kMask;
}

bool Primitives::prefers_heaps(Kind kind, std::size_t bytes) const {
  return preference_ != nullptr &&
         asks_for_heaps({kind, ReduceOp::kNone, bytes, size(), room()}, *preference_);
}

void Primitives::exchange(Peers reads, Peers readers) {
  if (!first_) [[likely]] {
    rounds_.turn(reads, readers, observer_);
    mark(Phase::kWait);
    return;
  }
  std::memcpy(rounds_.page(), &opening_, sizeof opening_);
  rounds_.turn_to_be_settled(Peers::all(), Peers::all(), observer_);
  first_ = false;
  compare_openings();
  rounds_.settle(arrival_.last_ns());
  mark(Phase::kWait);
}

// All ranks have turned the same round, so after a mismatch they are at the same place again, ready
// for the next call.
void Primitives::compare_openings() {
  for (int peer = 0; peer < size(); ++peer) {
    Opening their;
    std::memcpy(&their, rounds_.from(peer), sizeof their);
    const auto index = static_cast<std::size_t>(peer);
    if (peer == 0) scratch_.writer.follow(their.past);
    scratch_.factors[index] = std::bit_cast<double>(their.own);
    scratch_.counts[index] = their.own;
    arrival_.see(their.entered, peer);
    const std::span<std::byte> heap = rounds_.heap(peer);
    const auto place = [&](std::uint64_t at) {
      return at == 0 || heap.empty() ? nullptr : heap.data() + at - 1;
    };
    scratch_.ins[index] = place(their.in);
    scratch_.outs[index] = place(their.out);
    if (their.signature == opening_.signature) [[likely]]
      continue;
    end_mismatched([&](const SiteOf& site_of) {
      return concat("rank ", rank(), deed(opening_.signature), site_of(rank()), ", rank ", peer,
                    deed(their.signature), site_of(peer));
    });
  }
  if (!opening_.signature.counted) return;
  counts_->take(scratch_.counts);
  counts_->require();
}

// INVARIANT: all ranks find a mismatch that ends a call in the same round, so all turn this round,
// too: if the openings of two ranks differ, every rank finds an opening that differs from its own.
void Primitives::end_mismatched(const std::function<std::string(const SiteOf&)>& told) {
  const std::string mine = scratch_.refusal != nullptr ? concat(": ", *scratch_.refusal)
                           : scratch_.call_site        ? scratch_.call_site()
                                                       : "";
  SiteText text{};
  put_text(text, mine);
  std::memcpy(rounds_.page(), text.data(), text.size());
  const std::string& group = scratch_.group;
  const std::string begin =
      concat("the ranks", group.empty() ? "" : concat(" of ", group), " made different calls: ");
  const auto own = [&](int rank) { return rank == this->rank() ? mine : ""; };
  try {
    rounds_.turn(Peers::all(), Peers::all(), observer_);
  } catch (const Error& error) {
    throw Error(error.kind(), concat(begin, told(own), ". No data was moved. Then ", error.what()));
  }
  const auto all = [&](int rank) {
    if (rank == this->rank()) return mine;
    std::memcpy(text.data(), rounds_.from(rank), text.size());
    text.back() = '\0';
    return std::string(text.data());
  };
  throw Error(ErrorKind::kMismatch,
              concat(begin, told(all), ". No data was moved; the group stays usable"));
}

Reduction Primitives::scaled(const Reduction& how) const {
  Reduction result = how;
  result.factors = scratch_.factors.data();
  if (how.counts != nullptr) result.divisor = how.counts->divisor();
  return result;
}

void Primitives::gather_sources(const std::byte* own, std::size_t offset) {
  for (int peer = 0; peer < size(); ++peer) {
    scratch_.sources[static_cast<std::size_t>(peer)] = peer == rank() ? own : from(peer) + offset;
  }
}

void Primitives::reduce_all(const Reduction& how, const std::byte* own, std::size_t offset,
                            std::byte* out, std::size_t count) {
  gather_sources(own, offset);
  reduce_sources(how, out, count);
}

void Primitives::reduce_all(const Reduction& how, const std::byte* own, std::size_t offset,
                            const std::array<std::byte*, 2>& outs, std::size_t count) {
  gather_sources(own, offset);
  reduce_into(scaled(how), scratch_.sources, outs, count);
  count_received(static_cast<std::size_t>(size() - 1) * count * item_size(how.dtype));
  mark(Phase::kReduce);
}

void Primitives::reduce_heap(const Reduction& how, std::size_t offset, std::byte* out,
                             std::size_t count) {
  in_place_ = true;
  for (std::size_t r = 0; r < scratch_.ins.size(); ++r) {
    scratch_.sources[r] = scratch_.ins[r] + offset;
  }
  reduce_sources(how, out, count);
}

void Primitives::reduce_heaps(const Reduction& how, std::size_t offset, Peers into,
                              std::size_t count) {
  in_place_ = true;
  std::size_t targets = 0;
  for (int peer = 0; peer < size(); ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    scratch_.sources[index] = scratch_.ins[index] + offset;
    if (into.has(peer)) scratch_.targets[targets++] = scratch_.outs[index] + offset;
  }
  reduce_into(scaled(how), scratch_.sources, std::span(scratch_.targets).first(targets), count);
  count_received(static_cast<std::size_t>(size() - 1) * count * item_size(how.dtype));
  mark(Phase::kReduce);
}

std::uint64_t Primitives::place_of(const std::byte* data) const {
  if (data == nullptr) return 0;
  const std::span<std::byte> heap = rounds_.heap(rank());
  check(data >= heap.data() && data < heap.data() + heap.size(), ErrorKind::kInvalid,
        "a tensor of a sharded pass does not lie in the heap of rank ", rank());
  return static_cast<std::uint64_t>(data - heap.data()) + 1;
}

std::byte* Primitives::at_place(int rank, std::uint64_t place) {
  return place == 0 ? nullptr : rounds_.heap(rank).data() + place - 1;
}

bool Primitives::all_in() const {
  return std::find(scratch_.ins.begin(), scratch_.ins.end(), nullptr) == scratch_.ins.end();
}

bool Primitives::all_out() const {
  return std::find(scratch_.outs.begin(), scratch_.outs.end(), nullptr) == scratch_.outs.end();
}

void Primitives::reduce_sources(const Reduction& how, std::byte* out, std::size_t count) {
  reduce(scaled(how), scratch_.sources, out, count);
  count_received(static_cast<std::size_t>(size() - 1) * count * item_size(how.dtype));
  mark(Phase::kReduce);
}

void Primitives::combine_left(const Reduction& how, const std::byte* own, std::byte* out,
                              std::size_t count) {
  const std::array<const std::byte*, 2> sources{from(left()), own};
  reduce(how, sources, out, count);
  count_received(count * item_size(how.dtype));
  mark(Phase::kReduce);
}

void Primitives::pull(std::byte* to, int rank, std::size_t offset, std::size_t bytes) {
  in_place_ = true;
  copy_bytes(to, in(rank) + offset, bytes);
  if (rank != this->rank()) count_received(bytes);
  mark(Phase::kCopyOut);
}

void Primitives::get(std::byte* to, int rank, std::size_t offset, std::size_t bytes) {
  copy_bytes(to, from(rank) + offset, bytes);
  count_received(bytes);
  mark(Phase::kCopyOut);
}

void Primitives::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  copy_bytes(to, from, bytes);
  mark(Phase::kCopyOut);
}

void Primitives::put(std::size_t offset, const std::byte* data, std::size_t bytes, int readers) {
  if (data != page() + offset) {
    scratch_.writer.write(rounds_.coming(), page() + offset, data, bytes);
  }
  count_sent(bytes * static_cast<std::size_t>(readers));
  mark(Phase::kCopyIn);
}

}  // namespace dreamcomm

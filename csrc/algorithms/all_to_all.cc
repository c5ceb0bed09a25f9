// all_to_all of blocks of any sizes.
//
// Every page begins with a table: the sizes of the blocks that the rank gives to each peer and of
// those it expects. After the first turn all ranks know all tables, so all of them find the same
// mismatch, or the same largest block, which determines how many rounds follow. In round c the page
// holds chunk c of every block, side by side. Tensors in heaps are read in place after the first
// turn.
#include <algorithm>

#include "algorithms/algorithms.h"
#include "core/error.h"
#include "core/schedule.h"

namespace dreamcomm::algorithms {
namespace {

std::size_t table_entry(const Primitives& prims, int owner, std::size_t index) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, prims.from(owner) + index * sizeof bytes, sizeof bytes);
  return bytes;
}

void write_table(Primitives& prims, const Request& request) {
  const auto size = static_cast<std::size_t>(prims.size());
  for (std::size_t peer = 0; peer < size; ++peer) {
    const std::uint64_t given = request.in[peer].bytes;
    const std::uint64_t expected = request.out[peer].bytes;
    std::memcpy(prims.page() + peer * sizeof given, &given, sizeof given);
    std::memcpy(prims.page() + (size + peer) * sizeof expected, &expected, sizeof expected);
  }
}

/// Returns the largest block of all pairs of different ranks. Throws if two tables disagree, with
/// the same text on every rank.
std::size_t read_tables(Primitives& prims) {
  std::size_t largest = 0;
  const int size = prims.size();
  for (int giver = 0; giver < size; ++giver) {
    for (int taker = 0; taker < size; ++taker) {
      const auto n = static_cast<std::size_t>(size);
      const std::size_t given = table_entry(prims, giver, static_cast<std::size_t>(taker));
      const std::size_t expected = table_entry(prims, taker, n + static_cast<std::size_t>(giver));
      if (given != expected) [[unlikely]] {
        prims.end_mismatched([&](const Primitives::SiteOf& site_of) {
          return concat("in all_to_all as call ", prims.sequence(), " rank ", giver, site_of(giver),
                        " gives rank ", taker, ' ', given, " bytes, and rank ", taker,
                        site_of(taker), " expects ", expected);
        });
      }
      if (giver != taker) largest = std::max(largest, given);
    }
  }
  return largest;
}

/// Chunk `c` of a block that may have ended before it.
Range part_of(const Block& block, std::size_t piece, std::size_t c) {
  const std::size_t begin = std::min(block.bytes, c * piece);
  return {begin, std::min(block.bytes, begin + piece)};
}

}  // namespace

namespace {

struct Plan {
  std::size_t table;  // bytes at the start of a page
  std::size_t piece;  // bytes of one block in a page
};

Plan plan_of(const Primitives& prims) {
  const auto size = static_cast<std::size_t>(prims.size());
  const std::size_t table = (2 * size * sizeof(std::uint64_t) + Primitives::kAlign - 1) /
                            Primitives::kAlign * Primitives::kAlign;
  return {table, align_down((prims.room() - table) / size, Primitives::kAlign)};
}

void give_chunk(Primitives& prims, const Request& request, const Plan& plan, std::size_t c) {
  for (std::size_t peer = 0; peer < request.in.size(); ++peer) {
    if (static_cast<int>(peer) == prims.rank()) continue;
    const Range part = part_of(request.in[peer], plan.piece, c);
    prims.put(plan.table + peer * plan.piece, request.in[peer].data + part.begin, part.size(), 1);
  }
}

void take_chunk(Primitives& prims, const Request& request, const Plan& plan, std::size_t c) {
  const std::size_t mine = plan.table + static_cast<std::size_t>(prims.rank()) * plan.piece;
  for (std::size_t peer = 0; peer < request.out.size(); ++peer) {
    if (static_cast<int>(peer) == prims.rank()) continue;
    const Range part = part_of(request.out[peer], plan.piece, c);
    prims.get(request.out[peer].data + part.begin, static_cast<int>(peer), mine, part.size());
  }
}

/// Bytes that a rank gives to the ranks before `taker`: where the taker's block begins.
std::size_t given_before(const Primitives& prims, int giver, int taker) {
  std::size_t sum = 0;
  for (int rank = 0; rank < taker; ++rank) {
    sum += table_entry(prims, giver, static_cast<std::size_t>(rank));
  }
  return sum;
}

void pull_blocks(Primitives& prims, const Request& request) {
  for (int i = 0; i < prims.size(); ++i) {
    const int peer = (prims.rank() + i) % prims.size();
    const Block& to = request.out[static_cast<std::size_t>(peer)];
    prims.pull(to.data, peer, given_before(prims, peer, prims.rank()), to.bytes);
    if (peer != prims.rank()) prims.count_sent(request.in[static_cast<std::size_t>(peer)].bytes);
  }
  prims.exchange(Peers::all(), Peers::all());
}

}  // namespace

// A rank whose input lies in its heap and is large enough gives nothing in the first round. After
// that turn every rank knows which ranks did so. If all did, the blocks are read in place; if some
// did, the first round is repeated.
void all_to_all(Primitives& prims, const Request& request) {
  const Plan plan = plan_of(prims);
  std::size_t total = 0;
  for (const Block& block : request.in) total += block.bytes;
  const bool waits = prims.is_own_in() && prims.prefers_heaps(Kind::kAllToAll, total);
  write_table(prims, request);
  if (!waits) give_chunk(prims, request, plan, 0);
  prims.exchange(Peers::all(), Peers::all());
  const std::size_t rounds = std::max<std::size_t>(1, chunks(read_tables(prims), plan.piece));

  int waiting = 0;
  for (int rank = 0; rank < prims.size(); ++rank) {
    const bool prefers =
        prims.prefers_heaps(Kind::kAllToAll, given_before(prims, rank, prims.size()));
    if (prims.in(rank) != nullptr && prefers) ++waiting;
  }
  if (waiting == prims.size()) return pull_blocks(prims, request);
  std::size_t next = 1;
  if (waiting == 0) {
    take_chunk(prims, request, plan, 0);
  } else {
    next = 0;
  }
  for (std::size_t c = next; c < rounds; ++c) {
    give_chunk(prims, request, plan, c);
    prims.exchange(Peers::all(), Peers::all());
    take_chunk(prims, request, plan, c);
  }
  const auto self = static_cast<std::size_t>(prims.rank());
  prims.copy(request.out[self].data, request.in[self].data, request.in[self].bytes);
}

}  // namespace dreamcomm::algorithms

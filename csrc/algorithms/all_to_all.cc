// all_to_all of blocks of any sizes.
//
// Every page begins with a table: the sizes of the blocks the rank gives to each
// peer and of those it expects. After the first turn all ranks know all tables,
// so all of them find the same contradiction, or the same largest block, which
// says how many rounds follow. In round c the page holds chunk c of every block,
// side by side.
#include <algorithm>

#include "algorithms/rows.h"
#include "core/error.h"
#include "core/schedule.h"

namespace dreamcomm::rows {
namespace {

std::size_t table_entry(const Walk& walk, int owner, std::size_t index) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, walk.from(owner) + index * sizeof bytes, sizeof bytes);
  return bytes;
}

void write_table(Walk& walk, const Request& request) {
  const auto size = static_cast<std::size_t>(walk.size());
  for (std::size_t peer = 0; peer < size; ++peer) {
    const std::uint64_t given = request.in[peer].bytes;
    const std::uint64_t expected = request.out[peer].bytes;
    std::memcpy(walk.page() + peer * sizeof given, &given, sizeof given);
    std::memcpy(walk.page() + (size + peer) * sizeof expected, &expected, sizeof expected);
  }
}

/// The largest block of all pairs of different ranks. Throws if two tables
/// disagree, with the same words on every rank.
std::size_t read_tables(const Walk& walk) {
  std::size_t largest = 0;
  const int size = walk.size();
  for (int giver = 0; giver < size; ++giver) {
    for (int taker = 0; taker < size; ++taker) {
      const auto n = static_cast<std::size_t>(size);
      const std::size_t given = table_entry(walk, giver, static_cast<std::size_t>(taker));
      const std::size_t expected = table_entry(walk, taker, n + static_cast<std::size_t>(giver));
      check(given == expected, ErrorKind::kMismatch, "all_to_all: rank ", giver, " gives rank ",
            taker, ' ', given, " bytes, but rank ", taker, " expects ", expected, " from rank ",
            giver, ". No data was kept; the group stays usable");
      if (giver != taker) largest = std::max(largest, given);
    }
  }
  return largest;
}

/// Chunk `c` of a block that may have ended before.
Range part_of(const Block& block, std::size_t piece, std::size_t c) {
  const std::size_t begin = std::min(block.bytes, c * piece);
  return {begin, std::min(block.bytes, begin + piece)};
}

}  // namespace

void all_to_all(Walk& walk, const Request& request) {
  const auto size = static_cast<std::size_t>(walk.size());
  const auto self = static_cast<std::size_t>(walk.rank());
  const std::size_t table =
      (2 * size * sizeof(std::uint64_t) + Walk::kAlign - 1) / Walk::kAlign * Walk::kAlign;
  const std::size_t piece = align_down((walk.room() - table) / size, Walk::kAlign);
  std::size_t rounds = 1;
  for (std::size_t c = 0; c < rounds; ++c) {
    if (c == 0) write_table(walk, request);
    for (std::size_t peer = 0; peer < size; ++peer) {
      if (peer == self) continue;
      const Range part = part_of(request.in[peer], piece, c);
      walk.give(table + peer * piece, request.in[peer].data + part.begin, part.size(), 1);
    }
    walk.turn(Peers::all(), Peers::all());
    if (c == 0) rounds = std::max<std::size_t>(1, chunks(read_tables(walk), piece));
    for (std::size_t peer = 0; peer < size; ++peer) {
      if (peer == self) continue;
      const Range part = part_of(request.out[peer], piece, c);
      walk.take(request.out[peer].data + part.begin, static_cast<int>(peer), table + self * piece,
                part.size());
    }
  }
  copy_bytes(request.out[self].data, request.in[self].data, request.in[self].bytes);
}

}  // namespace dreamcomm::rows

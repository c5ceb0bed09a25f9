#include "core/schedule.h"

#include <array>
#include <cstddef>
#include <set>
#include <vector>

#include "doctest.h"

using namespace dreamcomm;

namespace {

// The table drawn in schedule.h.
constexpr std::array<std::array<int, 6>, 4> kSends = {{
    {0, 3, 2, 1, 0, 3},
    {1, 0, 3, 2, 1, 0},
    {2, 1, 0, 3, 2, 1},
    {3, 2, 1, 0, 3, 2},
}};

constexpr bool follows_table() {
  for (int rank = 0; rank < 4; ++rank) {
    for (int step = 0; step < 6; ++step) {
      const auto r = static_cast<std::size_t>(rank);
      const auto s = static_cast<std::size_t>(step);
      if (ring_send(rank, 4, step) != kSends[r][s]) return false;
      if (ring_receive(rank, 4, step) != kSends[(r + 3) % 4][s]) return false;
      if (step > 0 && ring_send(rank, 4, step) != ring_receive(rank, 4, step - 1)) return false;
    }
  }
  return true;
}
static_assert(follows_table());

constexpr std::size_t k31 = std::size_t{1} << 31;
constexpr std::size_t k32 = std::size_t{1} << 32;
constexpr std::size_t kMost = ~std::size_t{0};

static_assert(shard(10, 4, 0) == Range{0, 3});
static_assert(shard(10, 4, 1) == Range{3, 6});
static_assert(shard(10, 4, 2) == Range{6, 8});
static_assert(shard(10, 4, 3) == Range{8, 10});
static_assert(shard(0, 4, 3) == Range{0, 0});
static_assert(shard(2, 4, 3) == Range{2, 2});
static_assert(shard(k31 + 1, 2, 0) == Range{0, k31 / 2 + 1});
static_assert(shard(k31 + 1, 2, 1) == Range{k31 / 2 + 1, k31 + 1});
static_assert(shard(3 * k32 + 2, 3, 2) == Range{2 * k32 + 2, 3 * k32 + 2});
static_assert(shard(kMost, 7, 6).end == kMost);

static_assert(chunks(0, 8) == 0);
static_assert(chunks(1, 8) == 1);
static_assert(chunks(8, 8) == 1);
static_assert(chunks(9, 8) == 2);
static_assert(chunks(k32 + 1, 2) == k31 + 1);
static_assert(chunks(kMost, kMost) == 1);
static_assert(chunk(9, 8, 0) == Range{0, 8});
static_assert(chunk(9, 8, 1) == Range{8, 9});
static_assert(chunk(k32 + 1, 2, k31) == Range{k32, k32 + 1});
static_assert(chunk(kMost, kMost - 1, 1) == Range{kMost - 1, kMost});

// 4 ranks, 4 GiB of float32 each: 3/4 x S out in either half.
static_assert(ring_reduce_scatter_bytes(2, 4, k32, 4) == 3 * k32);
static_assert(ring_all_gather_bytes(2, 4, k32, 4) == 3 * k32);
static_assert(ring_all_reduce_bytes(2, 4, k32, 4) == 6 * k32);
static_assert(ring_all_reduce_bytes(0, 1, 100, 4) == 0);

const std::vector<int> kWorlds = {1, 2, 3, 4, 7, 64};
const std::vector<std::size_t> kCounts = {0, 1, 2, 3, 63, 64, 65, 1000, 3 * k32 + 5};

}  // namespace

TEST_CASE("shards follow one another, cover all, and differ by one element at the most") {
  for (const int parts : kWorlds) {
    for (const std::size_t count : kCounts) {
      std::size_t end = 0;
      for (int i = 0; i < parts; ++i) {
        const Range range = shard(count, parts, i);
        CHECK(range.begin == end);
        CHECK(range.size() - count / static_cast<std::size_t>(parts) <= 1);
        CHECK(range.size() <= shard(count, parts, 0).size());
        end = range.end;
      }
      CHECK(end == count);
    }
  }
}

TEST_CASE("chunks follow one another, cover all, and are full except the last") {
  for (const std::size_t total : {0, 1, 7, 8, 9, 100}) {
    for (const std::size_t per_chunk : {1, 3, 8, 1000}) {
      std::size_t end = 0;
      for (std::size_t i = 0; i < chunks(total, per_chunk); ++i) {
        const Range range = chunk(total, per_chunk, i);
        CHECK(range.begin == end);
        CHECK(range.size() == (range.end == total ? total - range.begin : per_chunk));
        CHECK(range.size() > 0);
        end = range.end;
      }
      CHECK(end == total);
    }
  }
}

TEST_CASE("the ring reduces every shard once and gathers them all") {
  for (const int size : kWorlds) {
    using Contributors = std::multiset<int>;
    const auto n = static_cast<std::size_t>(size);
    // held[rank][shard]: whose data is in the sum that the rank has of it
    std::vector<std::vector<Contributors>> held(n);
    for (int rank = 0; rank < size; ++rank) {
      held[static_cast<std::size_t>(rank)].assign(n, Contributors{rank});
    }
    for (int step = 0; step < 2 * ring_steps(size); ++step) {
      const auto before = held;
      for (int rank = 0; rank < size; ++rank) {
        const auto left = static_cast<std::size_t>(ring_rank(rank - 1, size));
        const int arriving = ring_receive(rank, size, step);
        REQUIRE(arriving == ring_send(static_cast<int>(left), size, step));
        const auto index = static_cast<std::size_t>(arriving);
        auto& mine = held[static_cast<std::size_t>(rank)][index];
        if (step >= ring_steps(size)) mine.clear();
        mine.insert(before[left][index].begin(), before[left][index].end());
      }
      if (step + 1 == ring_steps(size)) {
        for (int rank = 0; rank < size; ++rank) {
          const auto done = static_cast<std::size_t>(ring_rank(rank + 1, size));
          CHECK(held[static_cast<std::size_t>(rank)][done].size() == n);
        }
      }
    }
    Contributors all;
    for (int rank = 0; rank < size; ++rank) all.insert(rank);
    for (const auto& shards : held) {
      for (const Contributors& contributors : shards) CHECK(contributors == all);
    }
  }
}

TEST_CASE("the closed forms of bytes sent are the sums over the steps") {
  for (const int size : kWorlds) {
    for (const std::size_t count : kCounts) {
      std::size_t everyone = 0;
      for (int rank = 0; rank < size; ++rank) {
        std::size_t reduce_scatter = 0;
        std::size_t all_gather = 0;
        for (int step = 0; step < ring_steps(size); ++step) {
          const int late = ring_steps(size) + step;
          reduce_scatter += 4 * shard(count, size, ring_send(rank, size, step)).size();
          all_gather += 4 * shard(count, size, ring_send(rank, size, late)).size();
        }
        CHECK(ring_reduce_scatter_bytes(rank, size, count, 4) == reduce_scatter);
        CHECK(ring_all_gather_bytes(rank, size, count, 4) == all_gather);
        everyone += ring_all_reduce_bytes(rank, size, count, 4);
      }
      CHECK(everyone == 2 * static_cast<std::size_t>(size - 1) * count * 4);
    }
  }
}

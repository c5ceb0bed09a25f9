// Which ranks leave a crowded processor.
#include "transport/placement.h"

#include <doctest.h>

#include <array>
#include <vector>

namespace dreamcomm {
namespace {

/// The ranks that leave if all but `blocker` wait for it.
std::vector<int> leaving(std::span<const int> cpus, int blocker, int share) {
  std::vector<int> result;
  for (int rank = 0; rank < static_cast<int>(cpus.size()); ++rank) {
    if (rank != blocker && is_in_the_way(cpus, rank, blocker, share)) result.push_back(rank);
  }
  return result;
}

using Ranks = std::vector<int>;

TEST_CASE("with a processor for each, those beside the awaited rank leave") {
  CHECK(leaving(std::array{0, 1}, 0, 1) == Ranks{});
  CHECK(leaving(std::array{3, 3}, 0, 1) == Ranks{1});
  CHECK(leaving(std::array{3, 3}, 1, 1) == Ranks{0});
  CHECK(leaving(std::array{2, 2, 5}, 2, 1) == Ranks{});  // they wait together, for another
}

TEST_CASE("one rank leaves a crowd, and never the awaited one") {
  CHECK(leaving(std::array{0, 0, 1, 1}, 0, 2) == Ranks{});
  CHECK(leaving(std::array{0, 0, 0, 1}, 3, 2) == Ranks{2});
  CHECK(leaving(std::array{0, 0, 0, 1}, 2, 2) == Ranks{1});
  CHECK(leaving(std::array{0, 1, 1, 1}, 0, 2) == Ranks{3});
  CHECK(leaving(std::array{1, 1, 1, 1}, 3, 2) == Ranks{2});
  CHECK(leaving(std::array{0, 0, 1}, 2, 2) == Ranks{});  // two of three share one
}

}  // namespace
}  // namespace dreamcomm

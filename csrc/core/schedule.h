// Which rank owns, cuts and sends which elements in which step: arithmetic only. Every rank
// computes the same answers, so none of this is ever sent.
#pragma once

#include <algorithm>
#include <cstddef>

namespace dreamcomm {

/// The half-open interval [begin, end) of elements or bytes.
struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
  constexpr std::size_t size() const { return end - begin; }
  constexpr bool operator==(const Range&) const = default;
};

/// Shard `index` of `count` elements cut into `parts` contiguous shards. The
/// first `count % parts` shards are one element longer than the others.
/// Requires parts >= 1 and 0 <= index < parts.
constexpr Range shard(std::size_t count, int parts, int index) {
  const auto n = static_cast<std::size_t>(parts);
  const auto i = static_cast<std::size_t>(index);
  const std::size_t length = count / n;
  const std::size_t longer = count % n;
  const std::size_t begin = i * length + std::min(i, longer);
  return {begin, begin + length + (i < longer ? 1 : 0)};
}

/// Chunks of at most `per_chunk` (>= 1) that hold `total`; none for 0.
constexpr std::size_t chunks(std::size_t total, std::size_t per_chunk) {
  return total / per_chunk + (total % per_chunk == 0 ? 0 : 1);
}

/// Chunk `index` of them; all but the last are full.
constexpr Range chunk(std::size_t total, std::size_t per_chunk, std::size_t index) {
  const std::size_t begin = index * per_chunk;
  return {begin, begin + std::min(per_chunk, total - begin)};
}

/// Any whole number as a rank of a ring of `size`.
constexpr int ring_rank(long long number, int size) {
  const auto rest = static_cast<int>(number % size);
  return rest < 0 ? rest + size : rest;
}

// The ring: in every step each rank sends one shard to rank + 1 and receives
// one from rank - 1. In the first `ring_steps` steps it adds what it receives
// to its own (reduce-scatter), in the next as many it keeps what it receives
// (all-gather). One formula covers both. The shards that N = 4 ranks send:
//
//            reduce-scatter     all-gather
//     step   0    1    2      3    4    5
//   rank 0   0    3    2      1    0    3
//   rank 1   1    0    3      2    1    0
//   rank 2   2    1    0      3    2    1
//   rank 3   3    2    1      0    3    2
//
// A rank sends in a step the shard that it received in the step before. After step 2 it
// holds shard rank + 1 reduced, after step 5 all of them.
//
// A stand-alone reduce-scatter must end with shard `rank`: it is this schedule of rank - 1. A
// stand-alone all-gather starts with shard `rank`: it is this schedule from step 0.

/// Steps of either half.
constexpr int ring_steps(int size) { return size - 1; }

/// The shard that `rank` sends in `step`, 0 <= step < 2 * ring_steps(size).
constexpr int ring_send(int rank, int size, int step) {
  return ring_rank(static_cast<long long>(rank) - step, size);
}

/// The shard that `rank` receives in `step`.
constexpr int ring_receive(int rank, int size, int step) {
  return ring_rank(static_cast<long long>(rank) - step - 1, size);
}

/// Bytes `rank` sends in a ring's reduce-scatter of `count` elements of `item` bytes: all shards
/// except the one it ends with. (N-1)/N x S if N divides count.
constexpr std::size_t ring_reduce_scatter_bytes(int rank, int size, std::size_t count,
                                                std::size_t item) {
  const int kept = ring_rank(static_cast<long long>(rank) + 1, size);
  return (count - shard(count, size, kept).size()) * item;
}

/// Bytes `rank` sends in the all-gather that follows: all shards except that with which its right
/// neighbour began.
constexpr std::size_t ring_all_gather_bytes(int rank, int size, std::size_t count,
                                            std::size_t item) {
  const int neighbours = ring_rank(static_cast<long long>(rank) + 2, size);
  return (count - shard(count, size, neighbours).size()) * item;
}

/// Bytes `rank` sends in a ring all-reduce. 2(N-1)/N x S if N divides count.
constexpr std::size_t ring_all_reduce_bytes(int rank, int size, std::size_t count,
                                            std::size_t item) {
  return ring_reduce_scatter_bytes(rank, size, count, item) +
         ring_all_gather_bytes(rank, size, count, item);
}

}  // namespace dreamcomm

// How a tensor is divided among blocks, rounds and ranks: at multiples of a pack, so that every
// part begins and ends, except at the end of the tensor, where lanes read 16 bytes at once.
#pragma once

#include "core/schedule.h"
#include "gpu/collectives/vec16.h"

namespace dreamcomm::gpu {

constexpr std::size_t round_down(std::size_t bytes) { return bytes / kPackBytes * kPackBytes; }

/// Shard `rank` of `bytes`: whole packs; the last shard that has any also has the rest.
constexpr Range shard_bytes(std::size_t bytes, int size, int rank) {
  const Range packs = shard(chunks(bytes, kPackBytes), size, rank);
  const std::size_t begin = packs.begin * kPackBytes;
  const std::size_t end = packs.end * kPackBytes;
  return {begin < bytes ? begin : bytes, end < bytes ? end : bytes};
}

/// The chunks of one block: block, block + blocks, ...
struct BlockChunks {
  std::size_t bytes;      // of the tensor
  std::size_t per_chunk;  // bytes at most
  std::size_t first;      // this block's number
  std::size_t step;       // number of blocks

  constexpr std::size_t count() const {
    const std::size_t all = chunks(bytes, per_chunk);
    return all > first ? chunks(all - first, step) : 0;
  }
  /// Chunk `index` of this block's chunks.
  constexpr Range at(std::size_t index) const {
    return chunk(bytes, per_chunk, first + index * step);
  }
};

}  // namespace dreamcomm::gpu

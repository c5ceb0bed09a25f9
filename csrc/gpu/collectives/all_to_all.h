// all_to_all of blocks of any sizes, as in algorithms/all_to_all.cc.
//
// The first page of each block of the kernel begins with the sizes of the tensor's blocks that the
// rank gives and expects. After the first turn all ranks find the same contradiction, or the same
// largest block, which determines how many rounds follow. If all inputs are registered, the blocks
// are read in place instead. Later pages hold, side by side, a piece for every peer.
#pragma once

#include "gpu/collectives/block.h"

namespace dreamcomm::gpu::rows {

/// Sizes of the blocks of one call, from the openings.
struct Sizes {
  std::uint64_t largest = 0;             // of blocks between two different ranks
  std::uint64_t places[kMaxRanks] = {};  // where in each rank's input this rank's block begins
  bool agree = true;
  int giver = 0;  // of the first contradiction
  int taker = 0;
  std::uint64_t given = 0;
  std::uint64_t expected = 0;
};

template <Target T>
DREAMCOMM_DEVICE Sizes read_sizes(const Block<T>& block) {
  Sizes sizes;
  for (int giver = 0; giver < block.args.size; ++giver) {
    std::uint64_t place = 0;
    for (int taker = 0; taker < block.args.size; ++taker) {
      const std::uint64_t given = block.opening_of(giver).in_bytes[taker];
      const std::uint64_t expected = block.opening_of(taker).out_bytes[giver];
      if (given != expected && sizes.agree) {
        sizes.agree = false;
        sizes.giver = giver;
        sizes.taker = taker;
        sizes.given = given;
        sizes.expected = expected;
      }
      if (taker == block.args.rank) sizes.places[giver] = place;
      if (giver != taker && given > sizes.largest) sizes.largest = given;
      place += given;
    }
  }
  return sizes;
}

/// The part of a block of `bytes` that lies in `chunk`.
constexpr Range clamp(const Range& chunk, std::size_t bytes) {
  return {chunk.begin < bytes ? chunk.begin : bytes, chunk.end < bytes ? chunk.end : bytes};
}

template <Target T>
DREAMCOMM_DEVICE void fetch_blocks(Block<T>& block, const Sizes& sizes) {
  const KernelArgs& args = block.args;
  std::size_t begin = 0;  // of the peer's block in the output
  for (int peer = 0; peer < args.size; ++peer) {
    const BlockChunks mine = block.even_share(args.out_bytes[peer]);
    for (std::size_t k = 0; k < mine.count(); ++k) {
      const Range part = mine.at(k);
      block.copy(args.out + begin + part.begin,
                 block.ins.at[peer] + sizes.places[peer] + part.begin, part.size());
    }
    begin += args.out_bytes[peer];
  }
  block.end();
}

/// Copies this rank's own block directly, without the pages.
template <Target T>
DREAMCOMM_DEVICE void keep_own(Block<T>& block) {
  const KernelArgs& args = block.args;
  std::size_t from = 0;
  std::size_t to = 0;
  for (int r = 0; r < args.rank; ++r) {
    from += args.in_bytes[r];
    to += args.out_bytes[r];
  }
  const BlockChunks mine = block.even_share(args.in_bytes[args.rank]);
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range part = mine.at(k);
    block.copy(args.out + to + part.begin, args.in + from + part.begin, part.size());
  }
}

template <Target T>
DREAMCOMM_DEVICE void exchange_pages(Block<T>& block, std::uint64_t largest) {
  const KernelArgs& args = block.args;
  const std::size_t piece = round_down(block.rounds.page_bytes() / block.index_of(args.size));
  const BlockChunks mine = block.share(largest, piece);
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range now = mine.at(k);
    std::size_t begin = 0;
    for (int r = 0; r < args.size; ++r) {
      const Range part = clamp(now, args.in_bytes[r]);
      if (r != args.rank) {
        block.copy(block.rounds.page() + block.index_of(r) * piece, args.in + begin + part.begin,
                   part.size());
      }
      begin += args.in_bytes[r];
    }
    if (!block.turn_all()) return;
    begin = 0;
    for (int r = 0; r < args.size; ++r) {
      const Range part = clamp(now, args.out_bytes[r]);
      if (r != args.rank) {
        block.copy(args.out + begin + part.begin,
                   block.rounds.from(r) + block.index_of(args.rank) * piece, part.size());
      }
      begin += args.out_bytes[r];
    }
  }
  keep_own(block);
  block.rounds.close();
}

template <Target T>
DREAMCOMM_DEVICE void all_to_all(Block<T>& block) {
  const KernelArgs& args = block.args;
  auto* opening = reinterpret_cast<Opening*>(block.rounds.page());
  for (int r = block.target.lane(); r < args.size; r += block.target.lanes()) {
    opening->in_bytes[r] = args.in_bytes[r];
    opening->out_bytes[r] = args.out_bytes[r];
  }
  if (!block.open()) return;
  const Sizes sizes = read_sizes(block);
  if (!sizes.agree) {
    block.rounds.refuse_sizes(sizes.giver, sizes.taker, sizes.given, sizes.expected);
  } else if (block.all_in()) {
    fetch_blocks(block, sizes);
  } else {
    exchange_pages(block, sizes.largest);
  }
}

}  // namespace dreamcomm::gpu::rows

// Collectives on tensors that only their own rank can read: data for other ranks is copied through
// the pages of this block. The algorithms are those of algorithms/direct.cc and
// algorithms/data_movement.cc, with the chunks of a tensor divided among the blocks.
//
// The comment of each gives the bytes of memory traffic on a GPU that holds all N ranks, where S
// is a block's bytes.
#pragma once

#include "gpu/collectives/block.h"

namespace dreamcomm::gpu::rows {

/// A turn without data, which still compares the ranks' calls.
template <Target T>
DREAMCOMM_DEVICE void barrier(Block<T>& block) {
  if (block.turn_all()) block.rounds.close();
}

/// Each rank reduces all ranks' data. N(N + 3)S: 2NS into the pages, and N(N + 1)S from there.
template <typename F, Target T>
DREAMCOMM_DEVICE void one_shot(Block<T>& block) {
  const KernelArgs& args = block.args;
  const BlockChunks mine = block.spread(args.bytes, round_down(block.rounds.page_bytes()));
  if (mine.count() == 0) return barrier(block);
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range part = mine.at(k);
    block.copy(block.rounds.page(), args.in + part.begin, part.size());
    if (!block.turn_all()) return;
    block.template reduce<F>(block.pages(0, args.in + part.begin), to_one(args.out + part.begin), 1,
                             part.size());
  }
  block.rounds.close();
}

/// Each rank reduces its shard of every chunk. In the next round each rank (all_reduce), or only
/// the root (reduce), collects the others' results.
template <typename F, Target T>
DREAMCOMM_DEVICE void two_shot(Block<T>& block) {
  const KernelArgs& args = block.args;
  const bool everyone = args.info.kind == Kind::kAllReduce;
  const bool collects = everyone || args.rank == args.info.root;
  const Peers collectors = everyone ? Peers::all() : Peers::only(args.info.root);
  const std::size_t stage = round_down(block.rounds.page_bytes() / 2);
  const BlockChunks mine = block.spread(args.bytes, stage);
  const std::size_t total = mine.count();
  if (total == 0) return barrier(block);
  for (std::size_t k = 0; k <= total; ++k) {
    const bool last = k == total;
    const Range now = last ? Range{} : mine.at(k);
    block.copy_each_peer([&](int r) {
      const Range of = shard_bytes(now.size(), args.size, r);
      return CopyJob{block.rounds.page() + of.begin, args.in + now.begin + of.begin, of.size()};
    });
    const Peers reads = last && !collects ? Peers::none() : Peers::all();
    if (!block.rounds.turn(reads, last ? collectors : Peers::all())) return;
    const Range before = k > 0 && collects ? mine.at(k - 1) : Range{};
    block.copy_each_peer([&](int r) {
      const Range of = shard_bytes(before.size(), args.size, r);
      return CopyJob{args.out + before.begin + of.begin, block.rounds.from(r) + stage + of.begin,
                     of.size()};
    });
    const Range own = shard_bytes(now.size(), args.size, args.rank);
    Pointers outs = to_one(block.rounds.page() + stage + own.begin);
    if (collects) outs.at[1] = args.out + now.begin + own.begin;
    block.template reduce<F>(block.pages(own.begin, args.in + now.begin + own.begin), outs,
                             collects ? 2 : 1, own.size());
  }
  block.rounds.close();
}

/// A page holds a piece of the block for every peer, side by side.
template <typename F, Target T>
DREAMCOMM_DEVICE void reduce_scatter(Block<T>& block) {
  const KernelArgs& args = block.args;
  const std::size_t piece = round_down(block.rounds.page_bytes() / block.index_of(args.size));
  const BlockChunks mine = block.spread(args.bytes, piece);
  if (mine.count() == 0) return barrier(block);
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range part = mine.at(k);
    block.copy_each_peer([&](int r) {
      return CopyJob{block.rounds.page() + block.index_of(r) * piece,
                     args.in + block.index_of(r) * args.bytes + part.begin, part.size()};
    });
    if (!block.turn_all()) return;
    const std::byte* own = args.in + block.index_of(args.rank) * args.bytes + part.begin;
    block.template reduce<F>(block.pages(block.index_of(args.rank) * piece, own),
                             to_one(args.out + part.begin), 1, part.size());
  }
  block.rounds.close();
}

/// A page holds a piece of the rank's block; all read all of them (all_gather), or the
/// root does (gather).
template <Target T>
DREAMCOMM_DEVICE void gather(Block<T>& block) {
  const KernelArgs& args = block.args;
  const bool everyone = args.info.kind == Kind::kAllGather;
  const bool reads = everyone || args.rank == args.info.root;
  const Peers readers = everyone ? Peers::all() : Peers::only(args.info.root);
  const BlockChunks mine = block.spread(args.bytes, round_down(block.rounds.page_bytes()));
  if (mine.count() == 0) return barrier(block);
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range part = mine.at(k);
    block.copy(block.rounds.page(), args.in + part.begin, part.size());
    if (!block.rounds.turn(reads ? Peers::all() : Peers::none(), readers)) return;
    copy_each(block.target, reads ? args.size : 0, [&](int r) {
      const std::byte* from = r == args.rank ? args.in + part.begin : block.rounds.from(r);
      return CopyJob{args.out + block.index_of(r) * args.bytes + part.begin, from, part.size()};
    });
  }
  block.rounds.close();
}

/// The root's page holds a piece of its block (broadcast), or one of each rank's block,
/// side by side (scatter).
template <Target T>
DREAMCOMM_DEVICE void from_root(Block<T>& block) {
  const KernelArgs& args = block.args;
  const bool root = args.rank == args.info.root;
  const int blocks = args.info.kind == Kind::kScatter ? args.size : 1;
  const std::size_t piece = round_down(block.rounds.page_bytes() / block.index_of(blocks));
  const std::size_t own = block.index_of(blocks == 1 ? 0 : args.rank);
  const BlockChunks mine = block.spread(args.bytes, piece);
  if (mine.count() == 0) return barrier(block);
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range part = mine.at(k);
    copy_each(block.target, root ? blocks : 0, [&](int r) {
      return CopyJob{block.rounds.page() + block.index_of(r) * piece,
                     args.in + block.index_of(r) * args.bytes + part.begin, part.size()};
    });
    if (!block.rounds.turn(root ? Peers::none() : Peers::only(args.info.root),
                           root ? Peers::all() : Peers::none())) {
      return;
    }
    const std::byte* from = root ? args.in + own * args.bytes + part.begin
                                 : block.rounds.from(args.info.root) + own * piece;
    block.copy(args.out + part.begin, from, part.size());
  }
  block.rounds.close();
}

}  // namespace dreamcomm::gpu::rows

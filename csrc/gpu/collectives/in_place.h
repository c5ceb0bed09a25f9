// Collectives on tensors that all ranks map: registered memory. Nothing is staged.
//
// All run after Block::open(), and end with a turn among all ranks. Block b of every rank works on
// the same parts; where ranks write into others' tensors, block b works on parts of the writer's
// own shard. So block b works only on what block b has waited for.
//
// A kernel that fails cannot stop its peers: until all ranks' kernels have ended, they may still
// read and write its tensors. So registered memory and windows are freed only after all ranks'
// kernels have ended, also after a failure.
#pragma once

#include "gpu/collectives/block.h"

namespace dreamcomm::gpu::rows {

/// Each rank reduces all ranks' data into its own output, which must not be an input, since other
/// ranks read those. N(N + 1)S.
template <typename F, Target T>
DREAMCOMM_DEVICE void one_shot_in_place(Block<T>& block) {
  const KernelArgs& args = block.args;
  const BlockChunks mine = block.even_share(args.bytes);
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range part = mine.at(k);
    block.template reduce<F>(block.inputs(part.begin), to_one(args.out + part.begin), 1,
                             part.size());
  }
  block.end();
}

/// Each rank reduces its shard of every tensor and writes it into all of them (all_reduce), or
/// into the root's (reduce). 2NS, the minimum. An output may be an input: only rank r reads or
/// writes shard r of any tensor.
template <typename F, Target T>
DREAMCOMM_DEVICE void push(Block<T>& block) {
  const KernelArgs& args = block.args;
  const bool everyone = args.info.kind == Kind::kAllReduce;
  const Range shard = shard_bytes(args.bytes, args.size, args.rank);
  const BlockChunks mine = block.even_share(shard.size());
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range part = mine.at(k);
    const std::size_t at = shard.begin + part.begin;
    Pointers outs = to_one(block.outs.at[args.info.root] + at);
    for (int r = 0; everyone && r < args.size; ++r) outs.at[r] = block.outs.at[r] + at;
    block.template reduce<F>(block.inputs(at), outs, everyone ? args.size : 1, part.size());
  }
  block.end();
}

/// Only the inputs are registered: each rank reduces its shard of every chunk into its page, and
/// collects all shards from the pages. (3N + 1)S. An output may be the rank's own input: by the
/// time a rank writes its part of a chunk, in round k, all ranks have read it.
template <typename F, Target T>
DREAMCOMM_DEVICE void pull(Block<T>& block) {
  const KernelArgs& args = block.args;
  const std::size_t page = round_down(block.rounds.page_bytes());
  const BlockChunks mine = block.spread(args.bytes, page * block.index_of(args.size));
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range part = mine.at(k);
    const Range own = shard_bytes(part.size(), args.size, args.rank);
    block.template reduce<F>(block.inputs(part.begin + own.begin), to_one(block.rounds.page()), 1,
                             own.size());
    if (!block.turn_all()) return;
    copy_each(block.target, args.size, [&](int r) {
      const Range of = shard_bytes(part.size(), args.size, r);
      return CopyJob{args.out + part.begin + of.begin, block.rounds.from(r), of.size()};
    });
  }
  block.end();
}

/// Each rank reduces its block of every tensor into its own. (N + 1)NS.
template <typename F, Target T>
DREAMCOMM_DEVICE void reduce_scatter_in_place(Block<T>& block) {
  const KernelArgs& args = block.args;
  const BlockChunks mine = block.even_share(args.bytes);
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range part = mine.at(k);
    block.template reduce<F>(block.inputs(block.index_of(args.rank) * args.bytes + part.begin),
                             to_one(args.out + part.begin), 1, part.size());
  }
  block.end();
}

/// Each rank copies every peer's block (all_gather), or the root's (broadcast). It begins with the
/// peer to its right, so that no two ranks read the same one at the same time.
template <Target T>
DREAMCOMM_DEVICE void fetch(Block<T>& block) {
  const KernelArgs& args = block.args;
  const bool broadcasts = args.info.kind == Kind::kBroadcast;
  const BlockChunks mine = block.even_share(args.bytes);
  for (int i = 1; i <= (broadcasts ? 1 : args.size); ++i) {
    const int peer = broadcasts ? args.info.root : (args.rank + i) % args.size;
    std::byte* to = args.out + (broadcasts ? 0 : block.index_of(peer) * args.bytes);
    for (std::size_t k = 0; k < mine.count(); ++k) {
      const Range part = mine.at(k);
      block.copy(to + part.begin, block.ins.at[peer] + part.begin, part.size());
    }
  }
  block.end();
}

}  // namespace dreamcomm::gpu::rows

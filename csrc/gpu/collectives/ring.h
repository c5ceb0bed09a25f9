// The ring, for GPUs that reach only their neighbours fast: every rank reads from one neighbour
// only (core/schedule.h draws the table). Sums are not added in rank order.
//
// Even blocks pass data to the right, odd ones to the left, so that both directions of every link
// are used. An odd block acts as ring position N - 1 - rank, whose right neighbour is the rank's
// left one. Shards are numbered by ring position, not by rank. While block b waits for a neighbour,
// other blocks of the multiprocessor compute, so chunks form a pipeline.
#pragma once

#include "gpu/collectives/block.h"

namespace dreamcomm::gpu::rows {

/// One block's direction.
template <Target T>
struct Ring {
  Block<T>& block;
  bool mirrored;

  DREAMCOMM_DEVICE explicit Ring(Block<T>& b) : block(b), mirrored(b.target.block() % 2 == 1) {}

  DREAMCOMM_DEVICE int size() const { return block.args.size; }
  DREAMCOMM_DEVICE int mirror(int rank) const { return mirrored ? size() - 1 - rank : rank; }
  /// This rank's position in the ring.
  DREAMCOMM_DEVICE int self() const { return mirror(block.args.rank); }
  DREAMCOMM_DEVICE int left() const { return mirror(ring_rank(self() - 1, size())); }
  DREAMCOMM_DEVICE int right() const { return mirror(ring_rank(self() + 1, size())); }
  DREAMCOMM_DEVICE bool hop() const {
    return block.rounds.turn(Peers::only(left()), Peers::only(right()));
  }

  /// Combines what the left neighbour passed on with `own`. AVG divides at the last hop.
  template <typename F>
  DREAMCOMM_DEVICE void combine(bool last, const std::byte* own, const Pointers& outs, int count,
                                std::size_t bytes) const {
    Recipe recipe = block.recipe();
    if (recipe.op == ReduceOp::kAvg && !last) recipe.op = ReduceOp::kSum;
    Sources sources;
    sources.at[0] = block.rounds.from(left());
    sources.at[1] = own;
    gpu::reduce<F>(block.target, recipe, sources, 2, outs, count,
                   bytes / sizeof(typename F::Element));
  }
};

/// Moves 2(N - 1)/N x S from rank to rank; (6N - 4)S of memory traffic if one GPU holds all ranks.
template <typename F, Target T>
DREAMCOMM_DEVICE void ring_all_reduce(Block<T>& block) {
  const KernelArgs& args = block.args;
  const Ring<T> ring(block);
  const int half = ring_steps(args.size);
  const BlockChunks mine =
      block.spread(args.bytes, round_down(block.rounds.page_bytes()) * block.index_of(args.size));
  if (!block.turn_all()) return;  // compares the calls
  for (std::size_t k = 0; k < mine.count(); ++k) {
    const Range part = mine.at(k);
    const auto piece = [&](int index) { return shard_bytes(part.size(), args.size, index); };
    const Range first = piece(ring_send(ring.self(), args.size, 0));
    block.copy(block.rounds.page(), args.in + part.begin + first.begin, first.size());
    for (int step = 0; step < 2 * half; ++step) {
      if (!ring.hop()) return;
      const Range of = piece(ring_receive(ring.self(), args.size, step));
      const std::size_t at = part.begin + of.begin;
      if (step < half) {
        const bool last = step == half - 1;
        Pointers outs = to_one(block.rounds.page());
        outs.at[1] = args.out + at;
        ring.template combine<F>(last, args.in + at, outs, last ? 2 : 1, of.size());
      } else {
        std::byte* onward = step + 1 < 2 * half ? block.rounds.page() : nullptr;
        block.copy(args.out + at, block.rounds.from(ring.left()), of.size(), onward);
      }
    }
  }
  block.rounds.close();
}

}  // namespace dreamcomm::gpu::rows

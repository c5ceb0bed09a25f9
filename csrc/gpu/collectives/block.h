// One block of one rank in a call: what the bodies of all rows are written with.
#pragma once

#include "gpu/collectives/block_rounds.h"
#include "gpu/collectives/copy.h"
#include "gpu/collectives/partition.h"
#include "gpu/collectives/reduce.h"

namespace dreamcomm::gpu {

/// One block of one rank in a call.
template <Target T>
struct Block {
  const T& target;
  const KernelArgs& args;
  BlockRounds<T> rounds;
  // After open(): the ranks' registered tensors as mapped here, or null.
  Sources ins;
  Pointers outs;

  DREAMCOMM_DEVICE Block(const T& t, const KernelArgs& a) : target(t), args(a), rounds(t, a) {}

  DREAMCOMM_DEVICE int rank() const { return args.rank; }
  DREAMCOMM_DEVICE int size() const { return args.size; }
  DREAMCOMM_DEVICE std::size_t index_of(int rank) const { return static_cast<std::size_t>(rank); }
  DREAMCOMM_DEVICE Recipe recipe() const { return {args.info.op, args.divisor}; }

  /// This block's share of `bytes`, at most `per_chunk` at a time.
  DREAMCOMM_DEVICE BlockChunks share(std::size_t bytes, std::size_t per_chunk) const {
    return {bytes, per_chunk, static_cast<std::size_t>(target.block()),
            static_cast<std::size_t>(target.blocks())};
  }

  /// The same in chunks as equal as whole sectors allow, so that no block waits for one with more.
  DREAMCOMM_DEVICE BlockChunks spread(std::size_t bytes, std::size_t most) const {
    const std::size_t blocks = static_cast<std::size_t>(target.blocks());
    const std::size_t parts = chunks(bytes, most * blocks) * blocks;
    const std::size_t each = parts == 0 ? most : chunks(chunks(bytes, parts), kSector) * kSector;
    return share(bytes, each < most ? each : most);
  }

  /// One part for each block, as equal as whole rows of its lanes' packs allow.
  DREAMCOMM_DEVICE BlockChunks even_share(std::size_t bytes) const {
    const std::size_t unit = kPackBytes * static_cast<std::size_t>(target.lanes());
    const std::size_t units = chunks(bytes, unit);
    const std::size_t each = chunks(units, static_cast<std::size_t>(target.blocks()));
    return share(bytes, unit * (each > 0 ? each : 1));
  }

  DREAMCOMM_DEVICE void copy(std::byte* to, const std::byte* from, std::size_t bytes,
                             std::byte* also = nullptr) const {
    gpu::copy(target, to, also, from, bytes);
  }
  /// A copy for each rank except this one.
  template <typename JobOf>
  DREAMCOMM_DEVICE void copy_each_peer(const JobOf& job_of) const {
    copy_each(target, args.size - 1,
              [&](int number) { return job_of(number < args.rank ? number : number + 1); });
  }
  template <typename F>
  DREAMCOMM_DEVICE void reduce(const Sources& in, const Pointers& out, int outs,
                               std::size_t bytes) const {
    gpu::reduce<F>(target, recipe(), in, args.size, out, outs, bytes / sizeof(typename F::Element));
  }

  /// The pages of the last turn, from `offset` on; `own` stands for this rank's.
  DREAMCOMM_DEVICE Sources pages(std::size_t offset, const std::byte* own) const {
    Sources sources;
    for (int r = 0; r < args.size; ++r) {
      sources.at[r] = r == args.rank ? own : rounds.from(r) + offset;
    }
    return sources;
  }
  /// All ranks' registered inputs, from `offset` on.
  DREAMCOMM_DEVICE Sources inputs(std::size_t offset) const {
    Sources sources;
    for (int r = 0; r < args.size; ++r) sources.at[r] = ins.at[r] + offset;
    return sources;
  }

  /// The first turn. After it all ranks know which tensors are registered. All ranks' kernels run
  /// by then, so their inputs are complete and their outputs may be written.
  DREAMCOMM_DEVICE bool open() {
    if (target.lane() == 0) {
      auto* opening = reinterpret_cast<Opening*>(rounds.page());
      opening->in = args.in_place;
      opening->out = args.out_place;
    }
    if (!turn_all()) return false;
    constexpr int kAhead = 4;  // ranks whose openings are loaded at once
    for (int first = 0; first < args.size; first += kAhead) {
      std::uint64_t in[kAhead] = {};
      std::uint64_t out[kAhead] = {};
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= args.size) continue;
        in[i] = opening_of(first + i).in;
        out[i] = opening_of(first + i).out;
      }
      for (int i = 0; i < kAhead; ++i) {
        const int r = first + i;
        if (r >= args.size) continue;
        ins.at[r] = in[i] == 0 ? nullptr : args.heaps[r] + in[i] - 1;
        outs.at[r] = out[i] == 0 ? nullptr : args.heaps[r] + out[i] - 1;
      }
    }
    return true;
  }
  DREAMCOMM_DEVICE const Opening& opening_of(int rank) const {
    return *reinterpret_cast<const Opening*>(rounds.from(rank));
  }
  DREAMCOMM_DEVICE bool all_in() const {
    for (int r = 0; r < args.size; ++r) {
      if (ins.at[r] == nullptr) return false;
    }
    return true;
  }
  DREAMCOMM_DEVICE bool all_out() const {
    for (int r = 0; r < args.size; ++r) {
      if (outs.at[r] == nullptr) return false;
    }
    return true;
  }

  /// True if some rank's output is its input.
  DREAMCOMM_DEVICE bool any_over_itself() const {
    for (int r = 0; r < args.size; ++r) {
      if (outs.at[r] != nullptr && outs.at[r] == ins.at[r]) return true;
    }
    return false;
  }

  /// The last turn of rows in place: after it no rank reads or writes another's tensor.
  DREAMCOMM_DEVICE void end() {
    if (turn_all()) rounds.close();
  }
  DREAMCOMM_DEVICE bool turn_all() { return rounds.turn(Peers::all(), Peers::all()); }
};

DREAMCOMM_DEVICE Pointers to_one(std::byte* out) {
  Pointers pointers;
  pointers.at[0] = out;
  return pointers;
}

}  // namespace dreamcomm::gpu

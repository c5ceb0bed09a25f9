// The bare copies of the collectives: how fast these could be on this machine.
//
// The loops are those of the algorithms without all that makes them safe. Staged ones copy chunk k
// into one of two buffers, run a barrier, and read the peers' buffers; the other buffer may be
// written meanwhile (transport/rounds.h has the proof).
#include <algorithm>
#include <array>
#include <limits>

#include "algorithms/primitives.h"
#include "bench/arena.h"
#include "bench/trial.h"
#include "core/schedule.h"
#include "kernels/reduce.h"

namespace dreamcomm {
namespace {

constexpr std::array<std::size_t, 3> kChunks{std::size_t{64} << 10, std::size_t{256} << 10,
                                             Arena::kStage};

/// The sum of every rank's bytes at `from(rank)`, into all of `outs`.
template <typename From>
void add(const Arena& arena, std::size_t bytes, const From& from,
         std::span<std::byte* const> outs) {
  std::vector<const std::byte*> sources;
  for (std::size_t rank = 0; rank < arena.size(); ++rank) sources.push_back(from(rank));
  reduce_into({.dtype = DType::kFloat32, .op = ReduceOp::kSum}, sources, outs,
              bytes / sizeof(float));
}

/// Bytes of the shard of `total` that a rank reduces.
Range part(const Arena& arena, std::size_t total, std::size_t rank) {
  const Range items =
      shard(total / sizeof(float), static_cast<int>(arena.size()), static_cast<int>(rank));
  return {items.begin * sizeof(float), items.end * sizeof(float)};
}

// In heaps: after the first barrier everything is readable, after the second the call is done.

void in_heaps(Arena& arena, const Trial& trial, std::size_t index) {
  const std::size_t in = trial.row(trial.in, index).bytes;
  const std::size_t out = trial.row(trial.out, index).bytes;
  const std::size_t self = arena.self();
  const auto input = [&](std::size_t rank) { return arena.in(rank) + index * in; };
  const auto output = [&](std::size_t rank) { return arena.out(rank) + index * out; };
  arena.barrier();
  if (trial.kind == Kind::kAllReduce || trial.kind == Kind::kReduce) {
    const Range mine = part(arena, in, self);
    std::vector<std::byte*> outs;
    for (std::size_t rank = 0; rank < arena.size(); ++rank) {
      if (rank == 0 || trial.kind == Kind::kAllReduce) outs.push_back(output(rank) + mine.begin);
    }
    add(arena, mine.size(), [&](std::size_t rank) { return input(rank) + mine.begin; }, outs);
  } else if (trial.kind == Kind::kReduceScatter) {
    std::byte* const to = output(self);
    add(arena, out, [&](std::size_t rank) { return input(rank) + self * out; }, {&to, 1});
  } else if (trial.kind == Kind::kBroadcast) {
    copy_bytes(output(self), input(0), out);
  } else {
    const std::size_t block = out / arena.size();
    const std::size_t offset = trial.kind == Kind::kAllToAll ? self * block : 0;
    for (std::size_t i = 0; i < arena.size(); ++i) {
      const std::size_t rank = (self + i) % arena.size();
      copy_bytes(output(self) + rank * block, input(rank) + offset, block);
    }
  }
  arena.barrier();
}

// Staged. Round k writes chunk k; an all_reduce also collects the results of k-1.

void staged_reduction(Arena& arena, const Block& in, std::byte* out, std::size_t chunk_bytes,
                      bool everyone) {
  const std::size_t self = arena.self();
  const bool collects = everyone || self == 0;
  const std::size_t total = chunks(in.bytes, chunk_bytes);
  for (std::size_t k = 0; k <= total; ++k) {
    const Range now = k < total ? chunk(in.bytes, chunk_bytes, k) : Range{};
    for (std::size_t rank = 0; rank < arena.size(); ++rank) {
      const Range of = part(arena, now.size(), rank);
      if (rank == self) continue;
      copy_bytes(arena.stage(self, k) + of.begin, in.data + now.begin + of.begin, of.size());
    }
    arena.barrier();
    for (std::size_t rank = 0; collects && k > 0 && rank < arena.size(); ++rank) {
      const Range before = chunk(in.bytes, chunk_bytes, k - 1);
      const Range of = part(arena, before.size(), rank);
      if (rank == self) continue;
      copy_bytes(out + before.begin + of.begin, arena.result(rank, k) + of.begin, of.size());
    }
    const Range mine = part(arena, now.size(), self);
    const std::array<std::byte*, 2> outs{arena.result(self, k + 1) + mine.begin,
                                         out + now.begin + mine.begin};
    add(
        arena, mine.size(),
        [&](std::size_t rank) {
          return rank == self ? in.data + now.begin + mine.begin
                              : arena.stage(rank, k) + mine.begin;
        },
        std::span(outs).first(collects ? 2 : 1));
  }
}

void staged_reduce_scatter(Arena& arena, const Block& in, const Block& out,
                           std::size_t chunk_bytes) {
  const std::size_t self = arena.self();
  const std::size_t piece = align_down(chunk_bytes / arena.size(), Primitives::kAlign);
  for (std::size_t k = 0; k < chunks(out.bytes, piece); ++k) {
    const Range now = chunk(out.bytes, piece, k);
    for (std::size_t rank = 0; rank < arena.size(); ++rank) {
      if (rank == self) continue;
      copy_bytes(arena.stage(self, k) + rank * piece, in.data + rank * out.bytes + now.begin,
                 now.size());
    }
    arena.barrier();
    std::byte* const to = out.data + now.begin;
    add(arena, now.size(),
        [&](std::size_t rank) {
          return rank == self ? in.data + self * out.bytes + now.begin
                              : arena.stage(rank, k) + self * piece;
        },
        {&to, 1});
  }
}

void staged_copies(Arena& arena, Kind kind, const Block& in, const Block& out,
                   std::size_t chunk_bytes) {
  const std::size_t self = arena.self();
  const bool scatters = kind == Kind::kAllToAll;
  const std::size_t sources = kind == Kind::kBroadcast ? 1 : arena.size();
  const std::size_t block = out.bytes / sources;
  const std::size_t piece =
      scatters ? align_down(chunk_bytes / arena.size(), Primitives::kAlign) : chunk_bytes;
  const std::size_t copies = scatters ? arena.size() : 1;
  for (std::size_t k = 0; k < chunks(block, piece); ++k) {
    const Range now = chunk(block, piece, k);
    for (std::size_t i = 0; self < sources && i < copies; ++i) {
      if (scatters && i == self) continue;
      copy_bytes(arena.stage(self, k) + i * piece, in.data + i * block + now.begin, now.size());
    }
    arena.barrier();
    for (std::size_t rank = 0; rank < sources; ++rank) {
      if (rank == self) continue;
      copy_bytes(out.data + rank * block + now.begin,
                 arena.stage(rank, k) + (scatters ? self * piece : 0), now.size());
    }
  }
  if (self < sources) {
    copy_bytes(out.data + self * block, in.data + (scatters ? self * block : 0), block);
  }
}

void staged(Arena& arena, const Trial& trial, std::size_t index, std::size_t chunk_bytes) {
  const Block in = trial.row(trial.in, index);
  const Block out = trial.row(trial.out, index);
  if (trial.kind == Kind::kAllReduce || trial.kind == Kind::kReduce) {
    staged_reduction(arena, in, out.data, chunk_bytes, trial.kind == Kind::kAllReduce);
  } else if (trial.kind == Kind::kReduceScatter) {
    staged_reduce_scatter(arena, in, out, chunk_bytes);
  } else {
    staged_copies(arena, trial.kind, in, out, chunk_bytes);
  }
  arena.barrier();  // the next call begins with the first buffer again
}

/// The chunk size with the best median on rank 0, for all ranks.
std::size_t best_chunk(Arena& arena, const Trial& trial) {
  Trial few = trial;
  few.samples = std::min(3, trial.samples);
  std::size_t best = kChunks[0];
  double least = std::numeric_limits<double>::max();
  for (const std::size_t bytes : kChunks) {
    std::vector<double> seconds = time_rows(
        arena.communicator(), few, [&](std::size_t index) { staged(arena, few, index, bytes); });
    std::nth_element(seconds.begin(), seconds.begin() + static_cast<long>(seconds.size() / 2),
                     seconds.end());
    if (seconds[seconds.size() / 2] < least) {
      least = seconds[seconds.size() / 2];
      best = bytes;
    }
  }
  const Block block{reinterpret_cast<std::byte*>(&best), sizeof best};
  const std::span<const Block> in(&block, arena.self() == 0 ? 1 : 0);
  move(arena.communicator(), Kind::kBroadcast, in, {&block, 1});
  return best;
}

}  // namespace

std::vector<double> time_ceiling(Communicator& communicator, Heap& heap, const Trial& trial) {
  check_blocks(communicator, trial);
  Arena arena(communicator, heap, trial);
  std::vector<double> seconds;
  if (arena.all_in_heaps()) {
    seconds =
        time_rows(communicator, trial, [&](std::size_t index) { in_heaps(arena, trial, index); });
  } else {
    const std::size_t bytes = best_chunk(arena, trial);
    seconds = time_rows(communicator, trial,
                        [&](std::size_t index) { staged(arena, trial, index, bytes); });
  }
  move(communicator, Kind::kBarrier, {}, {});  // no rank reads this rank's memory after it
  return seconds;
}

}  // namespace dreamcomm

// The bare motions of the collectives: how fast they could be on this machine.
//
// The loops are those of the algorithms without all that makes them safe. Staged
// ones copy chunk k into one of two buffers, meet, and read the peers' buffers; the
// other buffer is free to be written meanwhile (transport/rounds.h has the proof).
#include <algorithm>
#include <array>
#include <limits>
#include <new>

#include "algorithms/walk.h"
#include "bench/trial.h"
#include "core/cpus.h"
#include "core/error.h"
#include "core/flag.h"
#include "core/schedule.h"
#include "kernels/reduce.h"
#include "transport/wait.h"

namespace dreamcomm {
namespace {

constexpr std::array<std::size_t, 3> kChunks{std::size_t{64} << 10, std::size_t{256} << 10,
                                             std::size_t{512} << 10};
constexpr std::size_t kLargest = kChunks.back();

void move(Communicator& communicator, Kind kind, std::span<const Block> in,
          std::span<const Block> out) {
  Request request;
  request.kind = kind;
  request.in = in;
  request.out = out;
  communicator.run(request);
}

/// Memory of every rank's heap, as mapped here, and a barrier over it.
class Floor {
 public:
  Floor(Communicator& communicator, Heap& heap, const Trial& trial)
      : comm_(communicator),
        memory_(heap.allocate(sizeof(Flag) + 4 * kLargest)),
        size_(static_cast<std::size_t>(communicator.size())),
        self_(static_cast<std::size_t>(communicator.rank())) {
    check(memory_ != nullptr, ErrorKind::kInvalid, "the ceiling needs ", 4 * kLargest,
          " bytes of the shared heap, which is full");
    new (memory_.get()) Flag();
    const std::array<std::byte*, 3> own{memory_.get(), trial.in.data, trial.out.data};
    for (std::size_t what = 0; what < own.size(); ++what) exchange(heap, own[what], what);
  }

  std::size_t size() const { return size_; }
  std::size_t self() const { return self_; }
  Communicator& communicator() const { return comm_; }
  /// Two for data that goes out, two for results; `round` chooses.
  std::byte* stage(std::size_t rank, std::size_t round) const {
    return at_[0][rank] + sizeof(Flag) + (round & 1) * kLargest;
  }
  std::byte* result(std::size_t rank, std::size_t round) const {
    return at_[0][rank] + sizeof(Flag) + (2 + (round & 1)) * kLargest;
  }
  std::byte* in(std::size_t rank) const { return at_[1][rank]; }
  std::byte* out(std::size_t rank) const { return at_[2][rank]; }
  bool all_in_heaps() const {
    const auto missing = [](const std::vector<std::byte*>& all) {
      return std::find(all.begin(), all.end(), nullptr) != all.end();
    };
    return !missing(at_[1]) && !missing(at_[2]);
  }

  void meet() {
    flag(self_).publish(++epoch_);
    for (std::size_t rank = 0; rank < size_; ++rank) {
      for (std::uint64_t looks = 1; !flag(rank).has(epoch_); ++looks) {
        relax();
        if (looks % kSpins == 0) be_patient(rank, looks);
      }
    }
  }

 private:
  static constexpr std::uint64_t kSpins = 256;

  Flag& flag(std::size_t rank) const {
    return *std::launder(reinterpret_cast<Flag*>(at_[0][rank]));
  }
  void be_patient(std::size_t rank, std::uint64_t looks) const {
    if (comm_.size() > cpus_ || looks > 100 * kSpins) sched_yield();
    check(looks < 10'000'000 * kSpins, ErrorKind::kTimeout, "the ceiling waited in vain for rank ",
          rank);
  }
  /// All ranks' addresses of one thing, null where it lies in no heap.
  void exchange(const Heap& heap, std::byte* own, std::size_t what) {
    std::uint64_t place = heap.holds(own) ? static_cast<std::uint64_t>(own - heap.data()) + 1 : 0;
    std::vector<std::uint64_t> places(size_);
    const Block in{reinterpret_cast<std::byte*>(&place), sizeof place};
    std::vector<Block> out;
    for (std::uint64_t& one : places) {
      out.push_back({reinterpret_cast<std::byte*>(&one), sizeof one});
    }
    move(comm_, Kind::kAllGather, {&in, 1}, out);
    for (std::size_t rank = 0; rank < size_; ++rank) {
      const std::span<std::byte> theirs = comm_.heap(static_cast<int>(rank));
      at_[what].push_back(places[rank] == 0 ? nullptr : theirs.data() + places[rank] - 1);
    }
  }

  Communicator& comm_;
  std::shared_ptr<std::byte> memory_;
  std::size_t size_;
  std::size_t self_;
  const int cpus_ = usable_cpus();
  std::uint32_t epoch_ = 0;
  std::array<std::vector<std::byte*>, 3> at_;
};

/// The sum of every rank's bytes at `from(rank)`, into all of `outs`.
template <typename From>
void add(const Floor& floor, std::size_t bytes, const From& from,
         std::span<std::byte* const> outs) {
  std::vector<const std::byte*> sources;
  for (std::size_t rank = 0; rank < floor.size(); ++rank) sources.push_back(from(rank));
  reduce_into({.dtype = DType::kFloat32, .op = ReduceOp::kSum}, sources, outs,
              bytes / sizeof(float));
}

/// Bytes of the shard of `total` that a rank reduces.
Range part(const Floor& floor, std::size_t total, std::size_t rank) {
  const Range items =
      shard(total / sizeof(float), static_cast<int>(floor.size()), static_cast<int>(rank));
  return {items.begin * sizeof(float), items.end * sizeof(float)};
}

// In heaps: after one meeting everything is readable, after the second it is done.

void in_heaps(Floor& floor, const Trial& trial, std::size_t index) {
  const std::size_t in = trial.row(trial.in, index).bytes;
  const std::size_t out = trial.row(trial.out, index).bytes;
  const std::size_t self = floor.self();
  const auto input = [&](std::size_t rank) { return floor.in(rank) + index * in; };
  const auto output = [&](std::size_t rank) { return floor.out(rank) + index * out; };
  floor.meet();
  if (trial.kind == Kind::kAllReduce || trial.kind == Kind::kReduce) {
    const Range mine = part(floor, in, self);
    std::vector<std::byte*> outs;
    for (std::size_t rank = 0; rank < floor.size(); ++rank) {
      if (rank == 0 || trial.kind == Kind::kAllReduce) outs.push_back(output(rank) + mine.begin);
    }
    add(floor, mine.size(), [&](std::size_t rank) { return input(rank) + mine.begin; }, outs);
  } else if (trial.kind == Kind::kReduceScatter) {
    std::byte* const to = output(self);
    add(floor, out, [&](std::size_t rank) { return input(rank) + self * out; }, {&to, 1});
  } else if (trial.kind == Kind::kBroadcast) {
    copy_bytes(output(self), input(0), out);
  } else {
    const std::size_t block = out / floor.size();
    const std::size_t offset = trial.kind == Kind::kAllToAll ? self * block : 0;
    for (std::size_t i = 0; i < floor.size(); ++i) {
      const std::size_t rank = (self + i) % floor.size();
      copy_bytes(output(self) + rank * block, input(rank) + offset, block);
    }
  }
  floor.meet();
}

// Staged. Round k writes chunk k, and of an all_reduce collects the results of k-1.

void staged_reduction(Floor& floor, const Block& in, std::byte* out, std::size_t chunk_bytes,
                      bool everyone) {
  const std::size_t self = floor.self();
  const bool collects = everyone || self == 0;
  const std::size_t total = chunks(in.bytes, chunk_bytes);
  for (std::size_t k = 0; k <= total; ++k) {
    const Range now = k < total ? chunk(in.bytes, chunk_bytes, k) : Range{};
    for (std::size_t rank = 0; rank < floor.size(); ++rank) {
      const Range of = part(floor, now.size(), rank);
      if (rank == self) continue;
      copy_bytes(floor.stage(self, k) + of.begin, in.data + now.begin + of.begin, of.size());
    }
    floor.meet();
    for (std::size_t rank = 0; collects && k > 0 && rank < floor.size(); ++rank) {
      const Range before = chunk(in.bytes, chunk_bytes, k - 1);
      const Range of = part(floor, before.size(), rank);
      if (rank == self) continue;
      copy_bytes(out + before.begin + of.begin, floor.result(rank, k) + of.begin, of.size());
    }
    const Range mine = part(floor, now.size(), self);
    const std::array<std::byte*, 2> outs{floor.result(self, k + 1) + mine.begin,
                                         out + now.begin + mine.begin};
    add(
        floor, mine.size(),
        [&](std::size_t rank) {
          return rank == self ? in.data + now.begin + mine.begin
                              : floor.stage(rank, k) + mine.begin;
        },
        std::span(outs).first(collects ? 2 : 1));
  }
}

void staged_reduce_scatter(Floor& floor, const Block& in, const Block& out,
                           std::size_t chunk_bytes) {
  const std::size_t self = floor.self();
  const std::size_t piece = chunk_bytes / floor.size();
  for (std::size_t k = 0; k < chunks(out.bytes, piece); ++k) {
    const Range now = chunk(out.bytes, piece, k);
    for (std::size_t rank = 0; rank < floor.size(); ++rank) {
      if (rank == self) continue;
      copy_bytes(floor.stage(self, k) + rank * piece, in.data + rank * out.bytes + now.begin,
                 now.size());
    }
    floor.meet();
    std::byte* const to = out.data + now.begin;
    add(floor, now.size(),
        [&](std::size_t rank) {
          return rank == self ? in.data + self * out.bytes + now.begin
                              : floor.stage(rank, k) + self * piece;
        },
        {&to, 1});
  }
}

void staged_copies(Floor& floor, Kind kind, const Block& in, const Block& out,
                   std::size_t chunk_bytes) {
  const std::size_t self = floor.self();
  const bool scatters = kind == Kind::kAllToAll;
  const std::size_t sources = kind == Kind::kBroadcast ? 1 : floor.size();
  const std::size_t block = out.bytes / sources;
  const std::size_t piece = scatters ? chunk_bytes / floor.size() : chunk_bytes;
  const std::size_t copies = scatters ? floor.size() : 1;
  for (std::size_t k = 0; k < chunks(block, piece); ++k) {
    const Range now = chunk(block, piece, k);
    for (std::size_t i = 0; self < sources && i < copies; ++i) {
      if (scatters && i == self) continue;
      copy_bytes(floor.stage(self, k) + i * piece, in.data + i * block + now.begin, now.size());
    }
    floor.meet();
    for (std::size_t rank = 0; rank < sources; ++rank) {
      if (rank == self) continue;
      copy_bytes(out.data + rank * block + now.begin,
                 floor.stage(rank, k) + (scatters ? self * piece : 0), now.size());
    }
  }
  if (self < sources) {
    copy_bytes(out.data + self * block, in.data + (scatters ? self * block : 0), block);
  }
}

void staged(Floor& floor, const Trial& trial, std::size_t index, std::size_t chunk_bytes) {
  const Block in = trial.row(trial.in, index);
  const Block out = trial.row(trial.out, index);
  if (trial.kind == Kind::kAllReduce || trial.kind == Kind::kReduce) {
    staged_reduction(floor, in, out.data, chunk_bytes, trial.kind == Kind::kAllReduce);
  } else if (trial.kind == Kind::kReduceScatter) {
    staged_reduce_scatter(floor, in, out, chunk_bytes);
  } else {
    staged_copies(floor, trial.kind, in, out, chunk_bytes);
  }
  floor.meet();  // the next call begins with the first buffer again
}

/// The chunk size with the best median on rank 0, for all ranks.
std::size_t best_chunk(Floor& floor, const Trial& trial) {
  Trial few = trial;
  few.samples = std::min(3, trial.samples);
  std::size_t best = kChunks[0];
  double least = std::numeric_limits<double>::max();
  for (const std::size_t bytes : kChunks) {
    std::vector<double> seconds = time_rows(
        floor.communicator(), few, [&](std::size_t index) { staged(floor, few, index, bytes); });
    std::nth_element(seconds.begin(), seconds.begin() + static_cast<long>(seconds.size() / 2),
                     seconds.end());
    if (seconds[seconds.size() / 2] < least) {
      least = seconds[seconds.size() / 2];
      best = bytes;
    }
  }
  const Block block{reinterpret_cast<std::byte*>(&best), sizeof best};
  const std::span<const Block> in(&block, floor.self() == 0 ? 1 : 0);
  move(floor.communicator(), Kind::kBroadcast, in, {&block, 1});
  return best;
}

}  // namespace

std::vector<double> time_ceiling(Communicator& communicator, Heap& heap, const Trial& trial) {
  switch (trial.kind) {
    case Kind::kBroadcast:
    case Kind::kAllReduce:
    case Kind::kReduce:
    case Kind::kAllGather:
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
      break;
    default:
      throw Error(ErrorKind::kInvalid, concat("no ceiling is known for ", name(trial.kind)));
  }
  Floor floor(communicator, heap, trial);
  std::vector<double> seconds;
  if (floor.all_in_heaps()) {
    seconds =
        time_rows(communicator, trial, [&](std::size_t index) { in_heaps(floor, trial, index); });
  } else {
    const std::size_t bytes = best_chunk(floor, trial);
    seconds = time_rows(communicator, trial,
                        [&](std::size_t index) { staged(floor, trial, index, bytes); });
  }
  move(communicator, Kind::kBarrier, {}, {});  // nobody looks at this rank's memory any more
  return seconds;
}

}  // namespace dreamcomm

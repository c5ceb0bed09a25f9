// The textbook formulas as the rows implement them, with S the bytes of a block, N the ranks and C
// the chunks. If ranks do different things, the slowest counts.
#include "algorithms/cost/formulas.h"

#include <algorithm>

#include "algorithms/table.h"
#include "core/schedule.h"

namespace dreamcomm::formulas {
namespace {

double ranks(const CallShape& call) { return static_cast<double>(call.size); }
double bytes(const CallShape& call) { return static_cast<double>(call.bytes); }

/// Rounds of chunks of `room` bytes; a call on nothing takes one, too.
double rounds(std::size_t total, std::size_t room) {
  return static_cast<double>(
      std::max<std::size_t>(1, chunks(total, std::max<std::size_t>(1, room))));
}

CostTerms turns(double count) { return {count, {}}; }

/// A call in heaps opens and closes with a turn.
CostTerms in_heaps(CopyKind kind, double amount) { return turns(2).with(kind, amount); }

}  // namespace

std::size_t memory(const CallShape& call) {
  const std::size_t blocks = static_cast<std::size_t>(call.size);
  switch (call.kind) {
    case Kind::kAllGather:
    case Kind::kGather:
    case Kind::kReduceScatter:
    case Kind::kScatter:
      return call.bytes * (blocks + 1);
    case Kind::kAllToAll:
      return call.bytes * 2;
    default:
      return call.bytes;
  }
}

CostTerms one_turn(const CallShape&) { return turns(1); }

CostTerms one_shot(const CallShape& call) {
  return turns(rounds(call.bytes, call.room))
      .with(CopyKind::kGive, bytes(call))
      .with(CopyKind::kFold, ranks(call) * bytes(call));
}

// The peers' shards are written into the page; the own result is written twice, into the page and
// into the tensor.
CostTerms direct_reduce(const CallShape& call) {
  return turns(rounds(call.bytes, call.room / 2) + 1)
      .with(CopyKind::kGive, bytes(call) * (ranks(call) + 1) / ranks(call))
      .with(CopyKind::kFold, bytes(call))
      .with(CopyKind::kTake, bytes(call) * (ranks(call) - 1) / ranks(call));
}

CostTerms master(const CallShape& call) {
  return turns(2 * rounds(call.bytes, call.room))
      .with(CopyKind::kGive, 2 * bytes(call))
      .with(CopyKind::kFold, ranks(call) * bytes(call))
      .with(CopyKind::kTake, bytes(call));
}

CostTerms ring_all_reduce(const CallShape& call) {
  const double hops = ranks(call) - 1;
  const double shard = bytes(call) / ranks(call);
  return turns(2 * hops * rounds(call.bytes / static_cast<std::size_t>(call.size), call.room))
      .with(CopyKind::kGive, shard * (1 + hops))
      .with(CopyKind::kFold, 2 * shard * hops)
      .with(CopyKind::kTake, shard * hops);
}

// A fold is measured in place. Here it writes another tensor, which costs as much as a take.
CostTerms direct_reduce_scatter(const CallShape& call) {
  return turns(rounds(call.bytes, call.room / static_cast<std::size_t>(call.size)))
      .with(CopyKind::kGive, bytes(call) * (ranks(call) - 1))
      .with(CopyKind::kFold, bytes(call) * ranks(call))
      .with(CopyKind::kTake, bytes(call));
}

CostTerms ring_reduce_scatter(const CallShape& call) {
  const double hops = ranks(call) - 1;
  return turns(hops * rounds(call.bytes, call.room))
      .with(CopyKind::kGive, bytes(call))
      .with(CopyKind::kFold, 2 * bytes(call) * hops);
}

// The root gives a chunk while the others take the one before.
CostTerms broadcast(const CallShape& call) {
  return turns(rounds(call.bytes, call.room))
      .with(CopyKind::kGive, static_cast<double>(std::min(call.bytes, call.room)))
      .with(CopyKind::kTake, bytes(call));
}

CostTerms all_gather(const CallShape& call) {
  return turns(rounds(call.bytes, call.room))
      .with(CopyKind::kGive, bytes(call))
      .with(CopyKind::kTake, bytes(call) * ranks(call));
}

CostTerms ring_all_gather(const CallShape& call) {
  const double hops = ranks(call) - 1;
  return turns(hops * rounds(call.bytes, call.room))
      .with(CopyKind::kGive, bytes(call) * std::max(1.0, hops))
      .with(CopyKind::kTake, bytes(call) * ranks(call));
}

CostTerms gather(const CallShape& call) { return all_gather(call); }

CostTerms scatter(const CallShape& call) {
  return turns(rounds(call.bytes, call.room / static_cast<std::size_t>(call.size)))
      .with(CopyKind::kGive, bytes(call) * (ranks(call) - 1))
      .with(CopyKind::kTake, bytes(call));
}

// S is what a rank gives to all.
CostTerms all_to_all(const CallShape& call) {
  return turns(rounds(call.bytes, call.room))
      .with(CopyKind::kGive, bytes(call) * (ranks(call) - 1) / ranks(call))
      .with(CopyKind::kTake, bytes(call));
}

CostTerms heap_reduce(const CallShape& call) {
  return in_heaps(CopyKind::kReduceHeaps, bytes(call));
}

CostTerms heap_reduce_scatter(const CallShape& call) {
  return in_heaps(CopyKind::kFoldHeaps, bytes(call) * ranks(call));
}

CostTerms heap_all_gather(const CallShape& call) {
  return in_heaps(CopyKind::kPull, bytes(call) * ranks(call));
}

CostTerms heap_all_to_all(const CallShape& call) { return in_heaps(CopyKind::kPull, bytes(call)); }

CostTerms heap_broadcast(const CallShape& call) { return in_heaps(CopyKind::kPull, bytes(call)); }

}  // namespace dreamcomm::formulas

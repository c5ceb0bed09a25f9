// The textbook's formulas as the rows carry them out, with S the bytes of a block, N
// the ranks and C the chunks. Where ranks do different things, the slowest counts.
#include "algorithms/cost/formulas.h"

#include <algorithm>

#include "algorithms/table.h"
#include "core/schedule.h"

namespace dreamcomm::efforts {
namespace {

double ranks(const CallShape& call) { return static_cast<double>(call.size); }
double bytes(const CallShape& call) { return static_cast<double>(call.bytes); }

/// Rounds of chunks of `room` bytes; a call on nothing takes one, too.
double rounds(std::size_t total, std::size_t room) {
  return static_cast<double>(
      std::max<std::size_t>(1, chunks(total, std::max<std::size_t>(1, room))));
}

Effort turns(double count) { return {count, {}}; }

/// In heaps a call opens and closes with a turn.
Effort in_heaps(Motion motion, double amount) { return turns(2).with(motion, amount); }

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

Effort one_turn(const CallShape&) { return turns(1); }

Effort one_shot(const CallShape& call) {
  return turns(rounds(call.bytes, call.room))
      .with(Motion::kGive, bytes(call))
      .with(Motion::kFold, ranks(call) * bytes(call));
}

// The shards of the peers are given; the result of the own is written twice, into the
// page and into the tensor.
Effort direct_reduce(const CallShape& call) {
  return turns(rounds(call.bytes, call.room / 2) + 1)
      .with(Motion::kGive, bytes(call) * (ranks(call) + 1) / ranks(call))
      .with(Motion::kFold, bytes(call))
      .with(Motion::kTake, bytes(call) * (ranks(call) - 1) / ranks(call));
}

Effort master(const CallShape& call) {
  return turns(2 * rounds(call.bytes, call.room))
      .with(Motion::kGive, 2 * bytes(call))
      .with(Motion::kFold, ranks(call) * bytes(call))
      .with(Motion::kTake, bytes(call));
}

Effort ring_all_reduce(const CallShape& call) {
  const double hops = ranks(call) - 1;
  const double shard = bytes(call) / ranks(call);
  return turns(2 * hops * rounds(call.bytes / static_cast<std::size_t>(call.size), call.room))
      .with(Motion::kGive, shard * (1 + hops))
      .with(Motion::kFold, 2 * shard * hops)
      .with(Motion::kTake, shard * hops);
}

// A fold is measured in place; here it writes another tensor, which costs as a take.
Effort direct_reduce_scatter(const CallShape& call) {
  return turns(rounds(call.bytes, call.room / static_cast<std::size_t>(call.size)))
      .with(Motion::kGive, bytes(call) * (ranks(call) - 1))
      .with(Motion::kFold, bytes(call) * ranks(call))
      .with(Motion::kTake, bytes(call));
}

Effort ring_reduce_scatter(const CallShape& call) {
  const double hops = ranks(call) - 1;
  return turns(hops * rounds(call.bytes, call.room))
      .with(Motion::kGive, bytes(call))
      .with(Motion::kFold, 2 * bytes(call) * hops);
}

// The root gives a chunk while the others take the one before.
Effort broadcast(const CallShape& call) {
  return turns(rounds(call.bytes, call.room))
      .with(Motion::kGive, static_cast<double>(std::min(call.bytes, call.room)))
      .with(Motion::kTake, bytes(call));
}

Effort all_gather(const CallShape& call) {
  return turns(rounds(call.bytes, call.room))
      .with(Motion::kGive, bytes(call))
      .with(Motion::kTake, bytes(call) * ranks(call));
}

Effort ring_all_gather(const CallShape& call) {
  const double hops = ranks(call) - 1;
  return turns(hops * rounds(call.bytes, call.room))
      .with(Motion::kGive, bytes(call) * std::max(1.0, hops))
      .with(Motion::kTake, bytes(call) * ranks(call));
}

Effort gather(const CallShape& call) { return all_gather(call); }

Effort scatter(const CallShape& call) {
  return turns(rounds(call.bytes, call.room / static_cast<std::size_t>(call.size)))
      .with(Motion::kGive, bytes(call) * (ranks(call) - 1))
      .with(Motion::kTake, bytes(call));
}

// S is what a rank gives to all.
Effort all_to_all(const CallShape& call) {
  return turns(rounds(call.bytes, call.room))
      .with(Motion::kGive, bytes(call) * (ranks(call) - 1) / ranks(call))
      .with(Motion::kTake, bytes(call));
}

Effort heap_reduce(const CallShape& call) { return in_heaps(Motion::kReduceHeaps, bytes(call)); }

Effort heap_reduce_scatter(const CallShape& call) {
  return in_heaps(Motion::kFoldHeaps, bytes(call) * ranks(call));
}

Effort heap_all_gather(const CallShape& call) {
  return in_heaps(Motion::kPull, bytes(call) * ranks(call));
}

Effort heap_all_to_all(const CallShape& call) { return in_heaps(Motion::kPull, bytes(call)); }

Effort heap_broadcast(const CallShape& call) { return in_heaps(Motion::kPull, bytes(call)); }

}  // namespace dreamcomm::efforts

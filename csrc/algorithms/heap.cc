// Collectives on tensors that lie in the ranks' heaps: no staging, two waits.
//
// All of them begin with Walk::open(), after which every rank has made the call,
// so that its inputs are written and its outputs may be. They end with a turn
// among all, after which nobody reads or writes another's tensor any more.
#include <algorithm>

#include "algorithms/algorithms.h"
#include "core/schedule.h"

namespace dreamcomm::algorithms {

// Each rank reduces its shard of every peer's input, in rank order, and writes the
// result into every peer's output (reduce: into the root's). In place, too: nobody
// but rank r reads or writes shard r of any tensor.
void heap_reduce(Walk& walk, const Request& request) {
  const bool everyone = request.kind == Kind::kAllReduce;
  const std::size_t item = item_size(request.reduction.dtype);
  const Range mine = shard(request.in[0].bytes / item, walk.size(), walk.rank());
  const Peers into = everyone ? Peers::all() : Peers::only(request.root);
  walk.reduce_heaps(request.reduction, mine.begin * item, into, mine.size());
  const std::size_t peers = static_cast<std::size_t>(walk.size() - 1);
  const std::size_t pushed = everyone ? peers : (walk.rank() == request.root ? 0U : 1U);
  walk.count_sent(mine.size() * item * pushed + request.in[0].bytes - mine.size() * item);
  if (everyone || walk.rank() == request.root) {
    walk.count_received(request.in[0].bytes - mine.size() * item);
  }
  walk.turn(Peers::all(), Peers::all());
}

// Each rank reduces its block of every peer's input into its own output.
void heap_reduce_scatter(Walk& walk, const Request& request) {
  const Block& out = request.out[0];
  const std::size_t item = item_size(request.reduction.dtype);
  const std::size_t offset = static_cast<std::size_t>(walk.rank()) * out.bytes;
  walk.reduce_heap(request.reduction, offset, out.data, out.bytes / item);
  walk.count_sent(out.bytes * static_cast<std::size_t>(walk.size() - 1));
  walk.turn(Peers::all(), Peers::all());
}

// Each rank copies its peers' inputs into its own output, beginning with the one
// to its right, so that no two read the same input at the same time.
void heap_all_gather(Walk& walk, const Request& request) {
  const Block& in = request.in[0];
  for (int i = 1; i < walk.size(); ++i) {
    const int peer = (walk.rank() + i) % walk.size();
    walk.pull(request.out[static_cast<std::size_t>(peer)].data, peer, 0, in.bytes);
    walk.count_sent(in.bytes);
  }
  walk.pull(request.out[static_cast<std::size_t>(walk.rank())].data, walk.rank(), 0, in.bytes);
  walk.turn(Peers::all(), Peers::all());
}

// Each rank copies the root's input.
void heap_broadcast(Walk& walk, const Request& request) {
  const Block& out = request.out[0];
  walk.pull(out.data, request.root, 0, out.bytes);
  if (walk.rank() == request.root) {
    walk.count_sent(out.bytes * static_cast<std::size_t>(walk.size() - 1));
  }
  walk.turn(Peers::all(), Peers::all());
}

}  // namespace dreamcomm::algorithms

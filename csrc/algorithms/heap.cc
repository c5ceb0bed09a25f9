// Collectives on tensors that lie in the ranks' heaps: no staging, two waits.
//
// Each of them begins with Primitives::open(). After it every rank has entered the call, so its
// inputs are written and its outputs may be. They end with a turn of all ranks, after which no rank
// reads or writes another's tensor.

#include "algorithms/algorithms.h"
#include "core/schedule.h"

namespace dreamcomm::algorithms {

// Each rank reduces its shard of every peer's input, in rank order, and writes the result into
// every peer's output (reduce: into the root's). In place, too: only rank r reads or writes shard r
// of any tensor.
void heap_reduce(Primitives& prims, const Request& request) {
  const bool everyone = request.kind == Kind::kAllReduce;
  const std::size_t item = item_size(request.reduction.dtype);
  const Range mine = shard(request.in[0].bytes / item, prims.size(), prims.rank());
  const Peers into = everyone ? Peers::all() : Peers::only(request.root);
  prims.reduce_heaps(request.reduction, mine.begin * item, into, mine.size());
  const std::size_t peers = static_cast<std::size_t>(prims.size() - 1);
  const std::size_t pushed = everyone ? peers : (prims.rank() == request.root ? 0U : 1U);
  prims.count_sent(mine.size() * item * pushed + request.in[0].bytes - mine.size() * item);
  if (everyone || prims.rank() == request.root) {
    prims.count_received(request.in[0].bytes - mine.size() * item);
  }
  prims.exchange(Peers::all(), Peers::all());
}

// Each rank reduces its block of every peer's input into its own output.
void heap_reduce_scatter(Primitives& prims, const Request& request) {
  const Block& out = request.out[0];
  const std::size_t item = item_size(request.reduction.dtype);
  const std::size_t offset = static_cast<std::size_t>(prims.rank()) * out.bytes;
  prims.reduce_heap(request.reduction, offset, out.data, out.bytes / item);
  prims.count_sent(out.bytes * static_cast<std::size_t>(prims.size() - 1));
  prims.exchange(Peers::all(), Peers::all());
}

// Each rank copies its peers' inputs into its own output, beginning with the one to its right, so
// that no two ranks read the same input at the same time.
void heap_all_gather(Primitives& prims, const Request& request) {
  const Block& in = request.in[0];
  for (int i = 1; i < prims.size(); ++i) {
    const int peer = (prims.rank() + i) % prims.size();
    prims.pull(request.out[static_cast<std::size_t>(peer)].data, peer, 0, in.bytes);
    prims.count_sent(in.bytes);
  }
  prims.pull(request.out[static_cast<std::size_t>(prims.rank())].data, prims.rank(), 0, in.bytes);
  prims.exchange(Peers::all(), Peers::all());
}

// Each rank copies the root's input.
void heap_broadcast(Primitives& prims, const Request& request) {
  const Block& out = request.out[0];
  prims.pull(out.data, request.root, 0, out.bytes);
  if (prims.rank() == request.root) {
    prims.count_sent(out.bytes * static_cast<std::size_t>(prims.size() - 1));
  }
  prims.exchange(Peers::all(), Peers::all());
}

}  // namespace dreamcomm::algorithms

// Reductions in which every rank reduces a part of all ranks' data, in rank order: the same bits
// whatever the size, the chunk or the rank.

#include "algorithms/algorithms.h"
#include "core/schedule.h"

namespace dreamcomm::algorithms {

// Round k: every page holds chunk k of its rank's input; each rank reduces all.
void one_shot(Primitives& prims, const Request& request) {
  const std::size_t item = item_size(request.reduction.dtype);
  const Block& in = request.in[0];
  const std::size_t per_chunk = align_down(prims.room(), Primitives::kAlign);
  const std::size_t total = chunks(in.bytes, per_chunk);
  if (total == 0) prims.exchange(Peers::all(), Peers::all());
  for (std::size_t k = 0; k < total; ++k) {
    const Range part = chunk(in.bytes, per_chunk, k);
    const std::byte* own = in.data + part.begin;
    prims.put(0, own, part.size(), prims.size() - 1);
    prims.exchange(Peers::all(), Peers::all());
    prims.reduce_all(request.reduction, own, 0, request.out[0].data + part.begin,
                     part.size() / item);
  }
}

// A page holds two things: the chunk's shards that the peers reduce ("stage"),
// and the shard of the chunk before that this rank has reduced ("result").
//
//     round     0        1        2       ...    C
//     stage     chunk 0  chunk 1  chunk 2        -
//     result    -        chunk 0  chunk 1        chunk C-1
//
// So C chunks take C + 1 rounds. After the turn of round k a rank collects its
// peers' results of chunk k-1 and reduces its own shard of chunk k into the page
// of round k+1. all_reduce: everyone collects. reduce: the root does.
void direct_reduce(Primitives& prims, const Request& request) {
  const bool everyone = request.kind == Kind::kAllReduce;
  const bool collects = everyone || prims.rank() == request.root;
  const std::size_t item = item_size(request.reduction.dtype);
  const std::size_t stage = align_down(prims.room() / 2, Primitives::kAlign);
  const auto size = static_cast<std::size_t>(prims.size());
  // A multiple of the world size: equal shards, so that traffic is even.
  const std::size_t per_chunk = align_down(stage / item, size);
  const std::byte* in = request.in[0].data;
  std::byte* out = collects ? request.out[0].data : nullptr;
  const std::size_t count = request.in[0].bytes / item;
  const std::size_t total = chunks(count, per_chunk);
  const auto foreign = static_cast<std::size_t>(everyone ? prims.size() - 1 : (collects ? 0 : 1));

  const auto piece = [&](std::size_t k, int rank) {  // in elements, within chunk k
    return shard(chunk(count, per_chunk, k).size(), prims.size(), rank);
  };
  if (total == 0) prims.exchange(Peers::all(), Peers::all());
  for (std::size_t k = 0; total != 0 && k <= total; ++k) {
    const std::size_t at = k * per_chunk * item;
    for (int peer = 0; k < total && peer < prims.size(); ++peer) {
      if (peer == prims.rank()) continue;
      const Range part = piece(k, peer);
      prims.put(part.begin * item, in + at + part.begin * item, part.size() * item, 1);
    }
    const bool last = k == total;
    const Peers collectors = everyone ? Peers::all() : Peers::only(request.root);
    prims.exchange(last && !collects ? Peers::none() : Peers::all(),
                   last ? collectors : Peers::all());
    for (int peer = 0; collects && k > 0 && peer < prims.size(); ++peer) {
      if (peer == prims.rank()) continue;
      const Range part = piece(k - 1, peer);
      prims.get(out + ((k - 1) * per_chunk + part.begin) * item, peer, stage, part.size() * item);
    }
    if (last) break;
    const Range mine = piece(k, prims.rank());
    std::byte* result = prims.page() + stage;
    const std::byte* own = in + at + mine.begin * item;
    if (collects) {
      prims.reduce_all(request.reduction, own, mine.begin * item,
                       {result, out + at + mine.begin * item}, mine.size());
    } else {
      prims.reduce_all(request.reduction, own, mine.begin * item, result, mine.size());
    }
    prims.count_sent(mine.size() * item * foreign);
  }
}

// Round c: a page holds chunk c of the block for every peer, side by side; each
// rank reduces its own.
void direct_reduce_scatter(Primitives& prims, const Request& request) {
  const std::size_t item = item_size(request.reduction.dtype);
  const auto size = static_cast<std::size_t>(prims.size());
  const auto self = static_cast<std::size_t>(prims.rank());
  const std::size_t piece = align_down(prims.room() / size, Primitives::kAlign);
  const Block& out = request.out[0];
  const std::size_t rounds = chunks(out.bytes, piece);
  if (rounds == 0) prims.exchange(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < rounds; ++c) {
    const Range part = chunk(out.bytes, piece, c);
    for (std::size_t peer = 0; peer < size; ++peer) {
      if (peer == self) continue;
      prims.put(peer * piece, request.in[peer].data + part.begin, part.size(), 1);
    }
    prims.exchange(Peers::all(), Peers::all());
    prims.reduce_all(request.reduction, request.in[self].data + part.begin, self * piece,
                     out.data + part.begin, part.size() / item);
  }
}

// The master node of the textbooks: rank 0 gathers everything, reduces it and
// broadcasts the result. Two rounds per chunk: inputs up, results down.
void master(Primitives& prims, const Request& request) {
  const std::size_t item = item_size(request.reduction.dtype);
  const std::size_t per_chunk = prims.room() / item;
  const Block& in = request.in[0];
  std::byte* out = request.out[0].data;
  const bool root = prims.rank() == 0;
  const std::size_t total = chunks(in.bytes / item, per_chunk);
  if (total == 0) prims.exchange(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < total; ++c) {
    const Range part = chunk(in.bytes / item, per_chunk, c);
    const std::size_t at = part.begin * item;
    const std::size_t bytes = part.size() * item;
    if (!root) prims.put(0, in.data + at, bytes, 1);
    prims.exchange(root ? Peers::all() : Peers::none(), Peers::only(0));
    if (root) {
      prims.reduce_all(request.reduction, in.data + at, 0, prims.page(), part.size());
      prims.count_sent(bytes * static_cast<std::size_t>(prims.size() - 1));
      prims.copy(out + at, prims.page(), bytes);
    }
    prims.exchange(Peers::only(0), root ? Peers::all() : Peers::none());
    if (!root) prims.get(out + at, 0, 0, bytes);
  }
}

}  // namespace dreamcomm::algorithms

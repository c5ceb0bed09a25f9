// Rings: every rank reads from its left neighbour only (core/schedule.h draws
// the table). Partial results start at another rank for every shard, so sums are
// not added in rank order, and 16-bit types are rounded at every hop.
#include "algorithms/algorithms.h"
#include "core/schedule.h"

namespace dreamcomm::algorithms {
namespace {

/// Only the last hop divides for AVG.
Reduction before_last(Reduction how) {
  how.divisor = 1;
  return how;
}

void hop(Primitives& prims) {
  prims.exchange(Peers::only(prims.left()), Peers::only(prims.right()));
}

}  // namespace

void ring_all_reduce(Primitives& prims, const Request& request) {
  const std::size_t item = item_size(request.reduction.dtype);
  const int size = prims.size();
  const std::size_t per_chunk = prims.room() / item * static_cast<std::size_t>(size);
  const std::size_t count = request.in[0].bytes / item;
  const std::size_t total = chunks(count, per_chunk);
  const int half = ring_steps(size);
  if (total == 0) prims.exchange(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < total; ++c) {
    const Range range = chunk(count, per_chunk, c);
    const std::byte* in = request.in[0].data + range.begin * item;
    std::byte* out = request.out[0].data + range.begin * item;
    const auto piece = [&](int index) { return shard(range.size(), size, index); };
    const Range first = piece(ring_send(prims.rank(), size, 0));
    prims.put(0, in + first.begin * item, first.size() * item, 1);
    for (int step = 0; step < 2 * half; ++step) {
      hop(prims);
      const Range part = piece(ring_receive(prims.rank(), size, step));
      const std::size_t at = part.begin * item;
      const std::size_t bytes = part.size() * item;
      if (step < half - 1) {
        prims.combine_left(before_last(request.reduction), in + at, prims.page(), part.size());
      } else if (step == half - 1) {
        prims.combine_left(request.reduction, in + at, prims.page(), part.size());
        prims.copy(out + at, prims.page(), bytes);
      } else {
        prims.get(out + at, prims.left(), 0, bytes);
        if (step + 1 < 2 * half) copy_bytes(prims.page(), out + at, bytes);
      }
      if (step + 1 < 2 * half) prims.count_sent(bytes);
    }
  }
}

// The schedule of rank - 1, so that it ends with the block of this rank.
void ring_reduce_scatter(Primitives& prims, const Request& request) {
  const std::size_t item = item_size(request.reduction.dtype);
  const int size = prims.size();
  const Block& out = request.out[0];
  const std::size_t per_chunk = align_down(prims.room(), item);
  const std::size_t total = chunks(out.bytes, per_chunk);
  if (total == 0) prims.exchange(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < total; ++c) {
    const Range part = chunk(out.bytes, per_chunk, c);
    const auto own = [&](int index) {
      return request.in[static_cast<std::size_t>(index)].data + part.begin;
    };
    prims.put(0, own(ring_send(prims.left(), size, 0)), part.size(), 1);
    for (int step = 0; step < ring_steps(size); ++step) {
      hop(prims);
      const bool last = step + 1 == ring_steps(size);
      prims.combine_left(last ? request.reduction : before_last(request.reduction),
                         own(ring_receive(prims.left(), size, step)),
                         last ? out.data + part.begin : prims.page(), part.size() / item);
      if (!last) prims.count_sent(part.size());
    }
  }
}

void ring_all_gather(Primitives& prims, const Request& request) {
  const int size = prims.size();
  const Block& in = request.in[0];
  const std::size_t total = chunks(in.bytes, prims.room());
  if (total == 0) prims.exchange(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < total; ++c) {
    const Range part = chunk(in.bytes, prims.room(), c);
    prims.put(0, in.data + part.begin, part.size(), 1);
    for (int step = 0; step < ring_steps(size); ++step) {
      hop(prims);
      const auto index = static_cast<std::size_t>(ring_receive(prims.rank(), size, step));
      std::byte* to = request.out[index].data + part.begin;
      prims.get(to, prims.left(), 0, part.size());
      if (step + 1 < ring_steps(size)) prims.put(0, to, part.size(), 1);
    }
  }
  prims.copy(request.out[static_cast<std::size_t>(prims.rank())].data, in.data, in.bytes);
}

}  // namespace dreamcomm::algorithms

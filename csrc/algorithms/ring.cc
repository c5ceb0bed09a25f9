// Rings: every rank reads from its left neighbour only (core/schedule.h draws
// the table). Partial results start at another rank for every shard, so sums are
// not added in rank order, and 16-bit types are rounded at every hop.
#include "algorithms/algorithms.h"
#include "core/schedule.h"

namespace dreamcomm::algorithms {
namespace {

/// The division of AVG belongs to the last hop alone.
Reduction before_last(Reduction how) {
  how.divisor = 1;
  return how;
}

void hop(Walk& walk) { walk.turn(Peers::only(walk.left()), Peers::only(walk.right())); }

}  // namespace

void ring_all_reduce(Walk& walk, const Request& request) {
  const std::size_t item = item_size(request.reduction.dtype);
  const int size = walk.size();
  const std::size_t per_chunk = walk.room() / item * static_cast<std::size_t>(size);
  const std::size_t count = request.in[0].bytes / item;
  const std::size_t total = chunks(count, per_chunk);
  const int half = ring_steps(size);
  if (total == 0) walk.turn(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < total; ++c) {
    const Range range = chunk(count, per_chunk, c);
    const std::byte* in = request.in[0].data + range.begin * item;
    std::byte* out = request.out[0].data + range.begin * item;
    const auto piece = [&](int index) { return shard(range.size(), size, index); };
    const Range first = piece(ring_send(walk.rank(), size, 0));
    walk.give(0, in + first.begin * item, first.size() * item, 1);
    for (int step = 0; step < 2 * half; ++step) {
      hop(walk);
      const Range part = piece(ring_receive(walk.rank(), size, step));
      const std::size_t at = part.begin * item;
      const std::size_t bytes = part.size() * item;
      if (step < half - 1) {
        walk.combine_left(before_last(request.reduction), in + at, walk.page(), part.size());
      } else if (step == half - 1) {
        walk.combine_left(request.reduction, in + at, walk.page(), part.size());
        walk.keep(out + at, walk.page(), bytes);
      } else {
        walk.take(out + at, walk.left(), 0, bytes);
        if (step + 1 < 2 * half) copy_bytes(walk.page(), out + at, bytes);
      }
      if (step + 1 < 2 * half) walk.count_sent(bytes);
    }
  }
}

// The walk of rank - 1, so that it ends with the block of this rank.
void ring_reduce_scatter(Walk& walk, const Request& request) {
  const std::size_t item = item_size(request.reduction.dtype);
  const int size = walk.size();
  const Block& out = request.out[0];
  const std::size_t per_chunk = align_down(walk.room(), item);
  const std::size_t total = chunks(out.bytes, per_chunk);
  if (total == 0) walk.turn(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < total; ++c) {
    const Range part = chunk(out.bytes, per_chunk, c);
    const auto own = [&](int index) {
      return request.in[static_cast<std::size_t>(index)].data + part.begin;
    };
    walk.give(0, own(ring_send(walk.left(), size, 0)), part.size(), 1);
    for (int step = 0; step < ring_steps(size); ++step) {
      hop(walk);
      const bool last = step + 1 == ring_steps(size);
      walk.combine_left(last ? request.reduction : before_last(request.reduction),
                        own(ring_receive(walk.left(), size, step)),
                        last ? out.data + part.begin : walk.page(), part.size() / item);
      if (!last) walk.count_sent(part.size());
    }
  }
}

void ring_all_gather(Walk& walk, const Request& request) {
  const int size = walk.size();
  const Block& in = request.in[0];
  const std::size_t total = chunks(in.bytes, walk.room());
  if (total == 0) walk.turn(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < total; ++c) {
    const Range part = chunk(in.bytes, walk.room(), c);
    walk.give(0, in.data + part.begin, part.size(), 1);
    for (int step = 0; step < ring_steps(size); ++step) {
      hop(walk);
      const auto index = static_cast<std::size_t>(ring_receive(walk.rank(), size, step));
      std::byte* to = request.out[index].data + part.begin;
      walk.take(to, walk.left(), 0, part.size());
      if (step + 1 < ring_steps(size)) walk.give(0, to, part.size(), 1);
    }
  }
  walk.keep(request.out[static_cast<std::size_t>(walk.rank())].data, in.data, in.bytes);
}

}  // namespace dreamcomm::algorithms

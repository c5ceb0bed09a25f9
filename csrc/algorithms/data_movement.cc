// Collectives that move bytes and compute nothing. In each of them a rank writes the bytes that
// others need into its page, and reads those it needs from theirs.
#include "algorithms/algorithms.h"
#include "core/schedule.h"

namespace dreamcomm::algorithms {
namespace {

Peers readers_if(bool reads) { return reads ? Peers::all() : Peers::none(); }

}  // namespace

void barrier(Primitives& prims, const Request&) { prims.exchange(Peers::all(), Peers::all()); }

// Round c: the root's page holds chunk c of its block.
void broadcast(Primitives& prims, const Request& request) {
  const Block& out = request.out[0];
  const bool root = prims.rank() == request.root;
  const std::size_t rounds = chunks(out.bytes, prims.room());
  if (rounds == 0) prims.exchange(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < rounds; ++c) {
    const Range part = chunk(out.bytes, prims.room(), c);
    if (root) prims.put(0, request.in[0].data + part.begin, part.size(), prims.size() - 1);
    prims.exchange(root ? Peers::none() : Peers::only(request.root), readers_if(root));
    if (!root) prims.get(out.data + part.begin, request.root, 0, part.size());
  }
  if (root) prims.copy(out.data, request.in[0].data, out.bytes);
}

// Round c: every page holds chunk c of its rank's block. All ranks read all
// pages (all_gather), or the root does (gather).
void gather(Primitives& prims, const Request& request) {
  const Block& in = request.in[0];
  const bool everyone = request.kind == Kind::kAllGather;
  const bool reads = everyone || prims.rank() == request.root;
  const Peers readers = everyone ? Peers::all() : Peers::only(request.root);
  const int foreign = everyone ? prims.size() - 1 : (reads ? 0 : 1);
  const auto self = static_cast<std::size_t>(prims.rank());
  const std::size_t rounds = chunks(in.bytes, prims.room());
  if (rounds == 0) prims.exchange(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < rounds; ++c) {
    const Range part = chunk(in.bytes, prims.room(), c);
    if (foreign > 0) prims.put(0, in.data + part.begin, part.size(), foreign);
    prims.exchange(readers_if(reads), readers);
    for (int peer = 0; reads && peer < prims.size(); ++peer) {
      if (peer == prims.rank()) continue;
      prims.get(request.out[static_cast<std::size_t>(peer)].data + part.begin, peer, 0,
                part.size());
    }
  }
  if (reads) prims.copy(request.out[self].data, in.data, in.bytes);
}

// Round c: the root's page holds chunk c of every rank's block, side by side.
void scatter(Primitives& prims, const Request& request) {
  const Block& out = request.out[0];
  const bool root = prims.rank() == request.root;
  const auto size = static_cast<std::size_t>(prims.size());
  const std::size_t piece = align_down(prims.room() / size, Primitives::kAlign);
  const std::size_t rounds = chunks(out.bytes, piece);
  if (rounds == 0) prims.exchange(Peers::all(), Peers::all());
  for (std::size_t c = 0; c < rounds; ++c) {
    const Range part = chunk(out.bytes, piece, c);
    for (std::size_t peer = 0; root && peer < size; ++peer) {
      if (static_cast<int>(peer) == prims.rank()) continue;
      prims.put(peer * piece, request.in[peer].data + part.begin, part.size(), 1);
    }
    prims.exchange(root ? Peers::none() : Peers::only(request.root), readers_if(root));
    if (root) continue;
    const std::size_t mine = static_cast<std::size_t>(prims.rank()) * piece;
    prims.get(out.data + part.begin, request.root, mine, part.size());
  }
  if (root)
    prims.copy(out.data, request.in[static_cast<std::size_t>(prims.rank())].data, out.bytes);
}

}  // namespace dreamcomm::algorithms

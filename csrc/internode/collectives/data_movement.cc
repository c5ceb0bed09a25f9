// Collectives that only move data. Each rank sends what is its own, but for a broadcast, of which
// each carrier sends a shard.
#include <array>
#include <vector>

#include "core/schedule.h"
#include "internode/collectives/dispatch.h"

namespace dreamcomm::spans {
namespace {

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

Block part_of(const Block& block, const Range& part) {
  return {block.data + part.begin, part.size()};
}

struct Chunk {
  std::vector<Cargo> room;
  Trip::Transfers receives;
  Trip::Transfers sends;
};

/// A rank's block goes to its stand-in of each other host, which hands it on there.
class AllGather {
 public:
  AllGather(Trip& trip, const Request& request) : trip_(trip), request_(request) {}

  void run() {
    const std::size_t bytes = request_.in[0].bytes;
    const std::size_t size = trip_.chunk();
    pipeline(
        chunks(bytes, size), [&](std::size_t k) { begin(k, chunk(bytes, size, k)); },
        [&](std::size_t k) { end(k, chunk(bytes, size, k)); });
    for (const Chunk& one : chunks_) trip_.wait(one.sends);
  }

 private:
  void begin(std::size_t k, const Range& part) {
    Chunk& now = chunks_[k % 2];
    trip_.wait(now.sends);
    now = Chunk{};
    now.room.resize(at(trip_.size()));
    for_others([&](int rank) {
      if (trip_.stand_in(rank) != trip_.index()) return;
      now.room[at(rank)] = trip_.room(part.size());
      trip_.receive(rank, now.room[at(rank)], number_of(k, 0));
    });
    now.receives = trip_.receives();
    const Block in = part_of(request_.in[0], part);
    const Cargo mine = trip_.kept({in.data, in.bytes});
    trip_.for_other_hosts([&](int host) {
      const int index = trip_.index() % trip_.topology().ranks_on(host);
      trip_.send(trip_.topology().rank_at(host, index), mine, number_of(k, 0));
    });
    trip_.depart(number_of(k, 0));
    now.sends = trip_.sends();
    std::vector<Block> out;
    for (const int rank : trip_.topology().ranks(trip_.host())) {
      out.push_back(part_of(request_.out[at(rank)], part));
    }
    trip_.here(Kind::kAllGather, Reduction{}, {&in, 1}, out);
  }

  void end(std::size_t k, const Range& part) {
    Chunk& now = chunks_[k % 2];
    trip_.wait(now.receives);
    for_others([&](int rank) {
      const Cargo& room = now.room[at(rank)];
      const Block in{room.data(), room.bytes};
      const Block out = part_of(request_.out[at(rank)], part);
      const int root = trip_.stand_in(rank);
      trip_.here(Kind::kBroadcast, Reduction{}, {&in, root == trip_.index() ? 1U : 0U}, {&out, 1},
                 root);
    });
  }

  /// Ranks of other hosts, in the same order on all of this one.
  template <typename Each>
  void for_others(Each&& each) {
    for (int rank = 0; rank < trip_.size(); ++rank) {
      if (trip_.topology().host_of(rank) != trip_.host()) each(rank);
    }
  }

  Trip& trip_;
  const Request& request_;
  std::array<Chunk, 2> chunks_;
};

/// A broadcast in the root's host; of each chunk, each carrier there sends its shard to its equal
/// in every other host, where the carriers hand them on.
class Broadcast {
 public:
  Broadcast(Trip& trip, const Request& request)
      : trip_(trip),
        request_(request),
        carriers_(trip.carriers()),
        home_(trip.topology().host_of(request.root)) {}

  void run() {
    const std::size_t bytes = request_.out[0].bytes;
    const std::size_t size = trip_.chunk();
    pipeline(
        chunks(bytes, size), [&](std::size_t k) { begin(k, chunk(bytes, size, k)); },
        [&](std::size_t k) { end(k, chunk(bytes, size, k)); });
    for (const Chunk& one : chunks_) trip_.wait(one.sends);
  }

 private:
  bool is_home() const { return trip_.host() == home_; }

  void begin(std::size_t k, const Range& part) {
    Chunk& now = chunks_[k % 2];
    trip_.wait(now.sends);
    now = Chunk{};
    const Range mine = trip_.carries() ? shard(part.size(), carriers_, trip_.index()) : Range{};
    const Block out = part_of(request_.out[0], part);
    if (!is_home()) {
      now.room.push_back(trip_.room(mine.size()));
      if (trip_.carries()) trip_.receive(trip_.partner(home_), now.room[0], number_of(k, 0));
      trip_.depart(number_of(k, 0));
      now.receives = trip_.receives();
      return;
    }
    const bool root = trip_.rank() == request_.root;
    const Block in = root ? part_of(request_.in[0], part) : Block{};
    trip_.here(Kind::kBroadcast, Reduction{}, {&in, root ? 1U : 0U}, {&out, 1},
               trip_.topology().index_of(request_.root));
    if (!trip_.carries()) return;
    const Cargo sent = trip_.kept({out.data + mine.begin, mine.size()});
    trip_.for_other_hosts(
        [&](int host) { trip_.send(trip_.partner(host), sent, number_of(k, 0)); });
    trip_.depart(number_of(k, 0));
    now.sends = trip_.sends();
  }

  void end(std::size_t k, const Range& part) {
    if (is_home()) return;
    Chunk& now = chunks_[k % 2];
    trip_.wait(now.receives);
    const Block out = part_of(request_.out[0], part);
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      const Block in{now.room[0].data(), now.room[0].bytes};
      const Block to = part_of(out, shard(part.size(), carriers_, carrier));
      trip_.here(Kind::kBroadcast, Reduction{}, {&in, carrier == trip_.index() ? 1U : 0U}, {&to, 1},
                 carrier);
    }
  }

  Trip& trip_;
  const Request& request_;
  const int carriers_;
  const int home_;  // the root's host
  std::array<Chunk, 2> chunks_;
};

/// Blocks between this rank and ranks of other hosts, straight from one to the other, in chunks:
/// all pairs at a time, whatever their sizes.
class Exchange {
 public:
  explicit Exchange(Trip& trip) : trip_(trip), chunk_(trip.chunk()) {}
  void send(int rank, const Block& block) { sends_.push_back({rank, block}); }
  void receive(int rank, const Block& block) { receives_.push_back({rank, block}); }

  void run() {
    std::size_t most = 0;
    for (const auto* list : {&sends_, &receives_}) {
      for (const Item& item : *list) most = std::max(most, item.block.bytes);
    }
    pipeline(
        chunks(most, chunk_), [this](std::size_t k) { begin(k); },
        [this](std::size_t k) { end(k); });
    for (const Chunk& one : chunks_) trip_.wait(one.sends);
  }

 private:
  struct Item {
    int rank;
    Block block;
  };

  Range part_of_chunk(const Item& item, std::size_t k) const {
    const std::size_t begin = std::min(k * chunk_, item.block.bytes);
    return {begin, std::min(begin + chunk_, item.block.bytes)};
  }

  void begin(std::size_t k) {
    Chunk& now = chunks_[k % 2];
    trip_.wait(now.sends);
    now = Chunk{};
    for (const Item& item : receives_) {
      now.room.push_back(trip_.room(part_of_chunk(item, k).size()));
      trip_.receive(item.rank, now.room.back(), number_of(k, 0));
    }
    now.receives = trip_.receives();
    for (const Item& item : sends_) {
      const Block part = part_of(item.block, part_of_chunk(item, k));
      if (part.bytes == 0) continue;
      trip_.send(item.rank, trip_.kept(part), number_of(k, 0));
    }
    trip_.depart(number_of(k, 0));
    now.sends = trip_.sends();
  }

  void end(std::size_t k) {
    Chunk& now = chunks_[k % 2];
    trip_.wait(now.receives);
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      const Range part = part_of_chunk(receives_[i], k);
      trip_.copy(receives_[i].block.data + part.begin, now.room[i].data(), part.size());
    }
  }

  Trip& trip_;
  const std::size_t chunk_;
  std::vector<Item> sends_;
  std::vector<Item> receives_;
  std::array<Chunk, 2> chunks_;
};

/// The blocks of the ranks of this host, or none.
std::vector<Block> of_this_host(const Trip& trip, std::span<const Block> blocks) {
  std::vector<Block> here;
  if (blocks.empty()) return here;
  for (const int rank : trip.topology().ranks(trip.host())) here.push_back(blocks[at(rank)]);
  return here;
}

}  // namespace

void all_gather(Trip& trip, const Request& request) { AllGather(trip, request).run(); }
void broadcast(Trip& trip, const Request& request) { Broadcast(trip, request).run(); }

void gather(Trip& trip, const Request& request) {
  const Topology& all = trip.topology();
  Exchange exchange(trip);
  if (all.host_of(request.root) == trip.host()) {
    trip.here(Kind::kGather, request.reduction, request.in, of_this_host(trip, request.out),
              all.index_of(request.root));
  } else {
    exchange.send(request.root, request.in[0]);
  }
  for (int rank = 0; trip.rank() == request.root && rank < trip.size(); ++rank) {
    if (all.host_of(rank) != trip.host()) exchange.receive(rank, request.out[at(rank)]);
  }
  exchange.run();
}

void scatter(Trip& trip, const Request& request) {
  const Topology& all = trip.topology();
  Exchange exchange(trip);
  if (all.host_of(request.root) == trip.host()) {
    trip.here(Kind::kScatter, request.reduction, of_this_host(trip, request.in), request.out,
              all.index_of(request.root));
  } else {
    exchange.receive(request.root, request.out[0]);
  }
  for (int rank = 0; trip.rank() == request.root && rank < trip.size(); ++rank) {
    if (all.host_of(rank) != trip.host()) exchange.send(rank, request.in[at(rank)]);
  }
  exchange.run();
}

void all_to_all(Trip& trip, const Request& request) {
  trip.here(Kind::kAllToAll, request.reduction, of_this_host(trip, request.in),
            of_this_host(trip, request.out));
  Exchange exchange(trip);
  for (int step = 1; step < trip.size(); ++step) {
    const int to = (trip.rank() + step) % trip.size();
    const int from = (trip.rank() + trip.size() - step) % trip.size();
    if (trip.topology().host_of(to) != trip.host()) exchange.send(to, request.in[at(to)]);
    if (trip.topology().host_of(from) != trip.host()) exchange.receive(from, request.out[at(from)]);
  }
  exchange.run();
}

}  // namespace dreamcomm::spans

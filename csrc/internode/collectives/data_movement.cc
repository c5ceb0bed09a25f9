// Collectives that only move data. Each rank sends its own data, except in a broadcast, where each
// carrier sends a shard.
#include <array>
#include <vector>

#include "core/schedule.h"
#include "internode/collectives/dispatch.h"

namespace dreamcomm::internode {
namespace {

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

Block part_of(const Block& block, const Range& part) {
  return {block.data + part.begin, part.size()};
}

struct Chunk {
  std::vector<Cargo> room;
  HierContext::Transfers receives;
  HierContext::Transfers sends;
};

/// A rank's block is sent to its stand-in on each other host, which passes it on there.
class AllGather {
 public:
  AllGather(HierContext& context, const Request& request) : context_(context), request_(request) {}

  void run() {
    const std::size_t bytes = request_.in[0].bytes;
    const std::size_t size = context_.chunk();
    pipeline(
        chunks(bytes, size), [&](std::size_t k) { begin(k, chunk(bytes, size, k)); },
        [&](std::size_t k) { end(k, chunk(bytes, size, k)); });
    for (const Chunk& one : chunks_) context_.wait(one.sends);
  }

 private:
  void begin(std::size_t k, const Range& part) {
    Chunk& now = chunks_[k % 2];
    context_.wait(now.sends);
    now = Chunk{};
    now.room.resize(at(context_.size()));
    for_others([&](int rank) {
      if (context_.stand_in(rank) != context_.index()) return;
      now.room[at(rank)] = context_.allocate(part.size());
      context_.receive(rank, now.room[at(rank)], number_of(k, 0));
    });
    now.receives = context_.receives();
    const Block in = part_of(request_.in[0], part);
    const Cargo mine = context_.keep({in.data, in.bytes});
    context_.for_other_hosts([&](int host) {
      const int index = context_.index() % context_.topology().ranks_on(host);
      context_.send(context_.topology().rank_at(host, index), mine, number_of(k, 0));
    });
    context_.depart(number_of(k, 0));
    now.sends = context_.sends();
    std::vector<Block> out;
    for (const int rank : context_.topology().ranks(context_.host())) {
      out.push_back(part_of(request_.out[at(rank)], part));
    }
    context_.run_on_host(Kind::kAllGather, Reduction{}, {&in, 1}, out);
  }

  void end(std::size_t k, const Range& part) {
    Chunk& now = chunks_[k % 2];
    context_.wait(now.receives);
    for_others([&](int rank) {
      const Cargo& room = now.room[at(rank)];
      const Block in{room.data(), room.bytes};
      const Block out = part_of(request_.out[at(rank)], part);
      const int root = context_.stand_in(rank);
      context_.run_on_host(Kind::kBroadcast, Reduction{}, {&in, root == context_.index() ? 1U : 0U},
                           {&out, 1}, root);
    });
  }

  /// Calls `each` for ranks of other hosts, in the same order on all of this one.
  template <typename Each>
  void for_others(Each&& each) {
    for (int rank = 0; rank < context_.size(); ++rank) {
      if (context_.topology().host_of(rank) != context_.host()) each(rank);
    }
  }

  HierContext& context_;
  const Request& request_;
  std::array<Chunk, 2> chunks_;
};

/// A broadcast within the root's host. Each carrier there sends its shard of each chunk to its
/// counterpart in every other host, where the carriers pass the shards on.
class Broadcast {
 public:
  Broadcast(HierContext& context, const Request& request)
      : context_(context),
        request_(request),
        carriers_(context.carriers()),
        home_(context.topology().host_of(request.root)) {}

  void run() {
    const std::size_t bytes = request_.out[0].bytes;
    const std::size_t size = context_.chunk();
    pipeline(
        chunks(bytes, size), [&](std::size_t k) { begin(k, chunk(bytes, size, k)); },
        [&](std::size_t k) { end(k, chunk(bytes, size, k)); });
    for (const Chunk& one : chunks_) context_.wait(one.sends);
  }

 private:
  bool is_home() const { return context_.host() == home_; }

  void begin(std::size_t k, const Range& part) {
    Chunk& now = chunks_[k % 2];
    context_.wait(now.sends);
    now = Chunk{};
    const Range mine =
        context_.carries() ? shard(part.size(), carriers_, context_.index()) : Range{};
    const Block out = part_of(request_.out[0], part);
    if (!is_home()) {
      now.room.push_back(context_.allocate(mine.size()));
      if (context_.carries())
        context_.receive(context_.partner(home_), now.room[0], number_of(k, 0));
      context_.depart(number_of(k, 0));
      now.receives = context_.receives();
      return;
    }
    const bool root = context_.rank() == request_.root;
    const Block in = root ? part_of(request_.in[0], part) : Block{};
    context_.run_on_host(Kind::kBroadcast, Reduction{}, {&in, root ? 1U : 0U}, {&out, 1},
                         context_.topology().index_of(request_.root));
    if (!context_.carries()) return;
    const Cargo sent = context_.keep({out.data + mine.begin, mine.size()});
    context_.for_other_hosts(
        [&](int host) { context_.send(context_.partner(host), sent, number_of(k, 0)); });
    context_.depart(number_of(k, 0));
    now.sends = context_.sends();
  }

  void end(std::size_t k, const Range& part) {
    if (is_home()) return;
    Chunk& now = chunks_[k % 2];
    context_.wait(now.receives);
    const Block out = part_of(request_.out[0], part);
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      const Block in{now.room[0].data(), now.room[0].bytes};
      const Block to = part_of(out, shard(part.size(), carriers_, carrier));
      context_.run_on_host(Kind::kBroadcast, Reduction{},
                           {&in, carrier == context_.index() ? 1U : 0U}, {&to, 1}, carrier);
    }
  }

  HierContext& context_;
  const Request& request_;
  const int carriers_;
  const int home_;  // the root's host
  std::array<Chunk, 2> chunks_;
};

/// Blocks between this rank and ranks of other hosts, directly from one to the other, in chunks:
/// all pairs at a time, whatever their sizes.
class Exchange {
 public:
  explicit Exchange(HierContext& context) : context_(context), chunk_(context.chunk()) {}
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
    for (const Chunk& one : chunks_) context_.wait(one.sends);
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
    context_.wait(now.sends);
    now = Chunk{};
    for (const Item& item : receives_) {
      now.room.push_back(context_.allocate(part_of_chunk(item, k).size()));
      context_.receive(item.rank, now.room.back(), number_of(k, 0));
    }
    now.receives = context_.receives();
    for (const Item& item : sends_) {
      const Block part = part_of(item.block, part_of_chunk(item, k));
      if (part.bytes == 0) continue;
      context_.send(item.rank, context_.keep(part), number_of(k, 0));
    }
    context_.depart(number_of(k, 0));
    now.sends = context_.sends();
  }

  void end(std::size_t k) {
    Chunk& now = chunks_[k % 2];
    context_.wait(now.receives);
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      const Range part = part_of_chunk(receives_[i], k);
      context_.copy(receives_[i].block.data + part.begin, now.room[i].data(), part.size());
    }
  }

  HierContext& context_;
  const std::size_t chunk_;
  std::vector<Item> sends_;
  std::vector<Item> receives_;
  std::array<Chunk, 2> chunks_;
};

/// The blocks of the ranks of this host, or none.
std::vector<Block> of_this_host(const HierContext& context, std::span<const Block> blocks) {
  std::vector<Block> here;
  if (blocks.empty()) return here;
  for (const int rank : context.topology().ranks(context.host())) here.push_back(blocks[at(rank)]);
  return here;
}

}  // namespace

void all_gather(HierContext& context, const Request& request) { AllGather(context, request).run(); }
void broadcast(HierContext& context, const Request& request) { Broadcast(context, request).run(); }

void gather(HierContext& context, const Request& request) {
  const Topology& all = context.topology();
  Exchange exchange(context);
  if (all.host_of(request.root) == context.host()) {
    context.run_on_host(Kind::kGather, request.reduction, request.in,
                        of_this_host(context, request.out), all.index_of(request.root));
  } else {
    exchange.send(request.root, request.in[0]);
  }
  for (int rank = 0; context.rank() == request.root && rank < context.size(); ++rank) {
    if (all.host_of(rank) != context.host()) exchange.receive(rank, request.out[at(rank)]);
  }
  exchange.run();
}

void scatter(HierContext& context, const Request& request) {
  const Topology& all = context.topology();
  Exchange exchange(context);
  if (all.host_of(request.root) == context.host()) {
    context.run_on_host(Kind::kScatter, request.reduction, of_this_host(context, request.in),
                        request.out, all.index_of(request.root));
  } else {
    exchange.receive(request.root, request.out[0]);
  }
  for (int rank = 0; context.rank() == request.root && rank < context.size(); ++rank) {
    if (all.host_of(rank) != context.host()) exchange.send(rank, request.in[at(rank)]);
  }
  exchange.run();
}

void all_to_all(HierContext& context, const Request& request) {
  context.run_on_host(Kind::kAllToAll, request.reduction, of_this_host(context, request.in),
                      of_this_host(context, request.out));
  Exchange exchange(context);
  for (int step = 1; step < context.size(); ++step) {
    const int to = (context.rank() + step) % context.size();
    const int from = (context.rank() + context.size() - step) % context.size();
    if (context.topology().host_of(to) != context.host()) exchange.send(to, request.in[at(to)]);
    if (context.topology().host_of(from) != context.host())
      exchange.receive(from, request.out[at(from)]);
  }
  exchange.run();
}

}  // namespace dreamcomm::internode

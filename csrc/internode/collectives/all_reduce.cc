// all_reduce: reduce-scatter in the host, all-reduce of the shard between hosts, all-gather in
// the host, as in BlueConnect (Cho et al., 2019) and NCCL's trees of hosts.
//
// Each carrier (a rank with a counterpart in every host) takes one shard of a chunk. Each host's
// carrier of a shard combines one piece of it for all, in the order of the hosts:
//
//     begin(k)    shards to the carriers, combined over the host's ranks; pieces to the hosts
//     combine(k)  the own piece over all hosts; the result to the other hosts
//     spread(k)   the shards' results to all ranks of the host
//
// Chunk k is spread while k+1 is combined and k+2 begins: a carrier sends 2(H-1)/H x S/C bytes.
#include <array>
#include <vector>

#include "core/schedule.h"
#include "internode/collectives/dispatch.h"
#include "internode/collectives/two_step_reduction.h"

namespace dreamcomm::internode {
namespace {

class AllReduce {
 public:
  AllReduce(HierContext& context, const Request& request)
      : context_(context),
        steps_(request.reduction, context.widens_halves()),
        in_(request.in[0].data),
        out_(request.out[0].data),
        count_(request.in[0].bytes / steps_.item()),
        per_chunk_(context.chunk() / steps_.wire_item()),
        total_(chunks(count_, per_chunk_)),
        carriers_(context.carriers()) {}

  void run() {
    for (std::size_t k = 0; k < kDepth && k < total_; ++k) expect(k);
    for (std::size_t k = 0; k < total_ + 2; ++k) {
      if (k < total_) begin(k);
      if (k >= 1 && k - 1 < total_) combine(k - 1);
      if (k >= 2) {
        spread(k - 2);
        if (k + 1 < total_) expect(k + 1);
      }
    }
    for (const Slot& slot : slots_) context_.wait(slot.sends);
  }

 private:
  struct Slot {
    Cargo partial;              // this carrier's shard, combined over the host
    std::vector<Cargo> pieces;  // of the other hosts' shards, the own piece
    Cargo result;               // the shard, combined over all
    HierContext::Transfers exchanged, collected, sends;
  };

  Slot& slot(std::size_t k) { return slots_[k % kDepth]; }
  Range elements(std::size_t k) const { return chunk(count_, per_chunk_, k); }
  Range shard_of(std::size_t k, int carrier) const {
    return shard(elements(k).size(), carriers_, carrier);
  }
  Range piece_of(std::size_t k, int host) const {
    return shard(shard_of(k, context_.index()).size(), context_.hosts(), host);
  }
  /// True if the shards are equal, and all of the host's ranks carry one.
  bool is_even(std::size_t k) const {
    return carriers_ == context_.ranks_here() &&
           elements(k).size() % static_cast<std::size_t>(carriers_) == 0;
  }

  /// Allocates and posts the receives of a chunk ahead of its messages, so that these need not
  /// wait.
  void expect(std::size_t k) {
    Slot& s = slot(k);
    context_.wait(s.sends);
    s = Slot{};
    if (!context_.carries()) return;
    const std::size_t size = shard_of(k, context_.index()).size();
    const std::size_t mine = piece_of(k, context_.host()).size();
    s.pieces.resize(static_cast<std::size_t>(context_.hosts()));
    s.partial = context_.allocate(size * steps_.wire_item());
    s.result = context_.allocate(size * steps_.item());
    context_.for_other_hosts([&](int host) {
      Cargo& theirs = s.pieces[static_cast<std::size_t>(host)];
      theirs = context_.allocate(mine * steps_.wire_item());
      context_.receive(context_.partner(host), theirs, number_of(k, 0));
    });
    s.exchanged = context_.receives();
    context_.for_other_hosts([&](int host) {
      context_.receive(context_.partner(host), result_of(k, host), number_of(k, 1));
    });
    s.collected = context_.receives();
  }

  Cargo result_of(std::size_t k, int host) {
    const Range piece = piece_of(k, host);
    return {slot(k).result.memory, piece.begin * steps_.item(), piece.size() * steps_.item()};
  }

  void begin(std::size_t k) {
    const Range part = elements(k);
    const Cargo wide = context_.widened(steps_, in_ + part.begin * steps_.item(), part.size());
    reduce_here(k, wide.data());
    if (!context_.carries()) return;
    Slot& s = slot(k);
    context_.for_other_hosts([&](int host) {
      const Range piece = piece_of(k, host);
      context_.send(
          context_.partner(host),
          {s.partial.memory, piece.begin * steps_.wire_item(), piece.size() * steps_.wire_item()},
          number_of(k, 0));
    });
    context_.depart(number_of(k, 0));
    keep_sends(s);
  }

  void reduce_here(std::size_t k, std::byte* wide) {
    std::vector<Block> in;
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      const Range s = shard_of(k, carrier);
      in.push_back({wide + s.begin * steps_.wire_item(), s.size() * steps_.wire_item()});
    }
    const Block own{slot(k).partial.data(), slot(k).partial.bytes};
    if (is_even(k)) return context_.run_on_host(Kind::kReduceScatter, steps_.here, in, {&own, 1});
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      const auto index = static_cast<std::size_t>(carrier);
      context_.run_on_host(Kind::kReduce, steps_.here, {&in[index], 1},
                           {&own, carrier == context_.index() ? 1U : 0U}, carrier);
    }
  }

  void combine(std::size_t k) {
    if (!context_.carries()) return;
    Slot& s = slot(k);
    context_.wait(s.exchanged);
    const Range mine = piece_of(k, context_.host());
    std::vector<const std::byte*> sources;
    for (int host = 0; host < context_.hosts(); ++host) {
      const bool own = host == context_.host();
      sources.push_back(own ? s.partial.data() + mine.begin * steps_.wire_item()
                            : s.pieces[static_cast<std::size_t>(host)].data());
    }
    const Cargo result = result_of(k, context_.host());
    context_.combine(steps_, sources, result.data(), mine.size());
    context_.for_other_hosts(
        [&](int host) { context_.send(context_.partner(host), result, number_of(k, 1)); });
    context_.depart(number_of(k, 1));
    keep_sends(s);
  }

  void spread(std::size_t k) {
    Slot& s = slot(k);
    context_.wait(s.collected);
    std::vector<Block> out;
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      const Range part = shard_of(k, carrier);
      out.push_back(
          {out_ + (elements(k).begin + part.begin) * steps_.item(), part.size() * steps_.item()});
    }
    const Block own{s.result.data(), s.result.bytes};
    if (is_even(k)) return context_.run_on_host(Kind::kAllGather, moved(), {&own, 1}, out);
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      const auto index = static_cast<std::size_t>(carrier);
      context_.run_on_host(Kind::kBroadcast, moved(), {&own, carrier == context_.index() ? 1U : 0U},
                           {&out[index], 1}, carrier);
    }
  }

  Reduction moved() const { return {.dtype = steps_.type}; }
  void keep_sends(Slot& s) {
    for (HierContext::Transfer& one : context_.sends()) s.sends.push_back(std::move(one));
  }

  HierContext& context_;
  const TwoStepReduction steps_;
  std::byte* const in_;
  std::byte* const out_;
  const std::size_t count_;
  const std::size_t per_chunk_;  // elements
  const std::size_t total_;
  const int carriers_;
  std::array<Slot, kDepth> slots_;
};

}  // namespace

void all_reduce(HierContext& context, const Request& request) { AllReduce(context, request).run(); }

}  // namespace dreamcomm::internode

// reduce and reduce_scatter: the sum of each host's ranks is sent to the rank that needs it, which
// combines the sums in the order of the hosts.
#include <array>
#include <vector>

#include "core/schedule.h"
#include "internode/collectives/dispatch.h"
#include "internode/collectives/two_step_reduction.h"

namespace dreamcomm::internode {
namespace {

/// The shares of the hosts' ranks, host by host: their messages, or this rank's own.
struct Shares {
  std::vector<Cargo> of_hosts;
  HierContext::Transfers receives;
  HierContext::Transfers sends;
};

void combine(HierContext& context, const TwoStepReduction& steps, Shares& shares, std::byte* out,
             std::size_t count) {
  context.wait(shares.receives);
  std::vector<const std::byte*> sources;
  for (const Cargo& one : shares.of_hosts) sources.push_back(one.data());
  context.combine(steps, sources, out, count);
}

/// Each carrier of the root's host combines a shard of a chunk; the root collects them.
class Reduce {
 public:
  Reduce(HierContext& context, const Request& request)
      : context_(context),
        request_(request),
        steps_(request.reduction, context.widens_halves()),
        count_(request.in[0].bytes / steps_.item()),
        per_chunk_(context.chunk() / steps_.wire_item()),
        carriers_(context.carriers()),
        home_(context.topology().host_of(request.root)) {}

  void run() {
    pipeline(
        chunks(count_, per_chunk_), [this](std::size_t k) { begin(k); },
        [this](std::size_t k) { end(k); });
    for (const Shares& one : shares_) context_.wait(one.sends);
  }

 private:
  Range elements(std::size_t k) const { return chunk(count_, per_chunk_, k); }
  Range shard_of(std::size_t k, int carrier) const {
    return shard(elements(k).size(), carriers_, carrier);
  }
  bool is_home() const { return context_.host() == home_; }

  void begin(std::size_t k) {
    Shares& s = shares_[k % 2];
    context_.wait(s.sends);
    s = Shares{};
    const std::size_t bytes =
        context_.carries() ? shard_of(k, context_.index()).size() * steps_.wire_item() : 0;
    s.of_hosts.resize(static_cast<std::size_t>(context_.hosts()));
    for (int host = 0; context_.carries() && host < context_.hosts(); ++host) {
      Cargo& one = s.of_hosts[static_cast<std::size_t>(host)];
      if (is_home() || host == context_.host()) one = context_.allocate(bytes);
      if (!is_home() || host == context_.host()) continue;
      context_.receive(context_.partner(host), one, number_of(k, 0));
    }
    s.receives = context_.receives();
    const Range part = elements(k);
    const Cargo wide =
        context_.widened(steps_, request_.in[0].data + part.begin * steps_.item(), part.size());
    const Cargo& own = s.of_hosts[static_cast<std::size_t>(context_.host())];
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      const Range r = shard_of(k, carrier);
      const Block in{wide.data() + r.begin * steps_.wire_item(), r.size() * steps_.wire_item()};
      const Block out{own.data(), own.bytes};
      context_.run_on_host(Kind::kReduce, steps_.here, {&in, 1},
                           {&out, carrier == context_.index() ? 1U : 0U}, carrier);
    }
    if (context_.carries() && !is_home())
      context_.send(context_.partner(home_), own, number_of(k, 0));
    context_.depart(number_of(k, 0));
    s.sends = context_.sends();
  }

  void end(std::size_t k) {
    if (!is_home()) return;
    const Cargo done = context_.allocate(per_chunk_ * steps_.item());
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      const Range r = shard_of(k, carrier);
      const bool own = carrier == context_.index();
      if (own) combine(context_, steps_, shares_[k % 2], done.data(), r.size());
      // All ranks take part in the broadcast, but only the root uses the result.
      std::byte* target = done.data();
      if (context_.rank() == request_.root) {
        target = request_.out[0].data + (elements(k).begin + r.begin) * steps_.item();
      }
      const Block in{done.data(), r.size() * steps_.item()};
      const Block out{target, r.size() * steps_.item()};
      context_.run_on_host(Kind::kBroadcast, {.dtype = steps_.type}, {&in, own ? 1U : 0U},
                           {&out, 1}, carrier);
    }
  }

  HierContext& context_;
  const Request& request_;
  const TwoStepReduction steps_;
  const std::size_t count_;
  const std::size_t per_chunk_;  // elements
  const int carriers_;
  const int home_;  // the root's host
  std::array<Shares, 2> shares_;
};

/// A host's share of a rank's block is added up at that rank's stand-in there, which sends it.
class ReduceScatter {
 public:
  ReduceScatter(HierContext& context, const Request& request)
      : context_(context),
        request_(request),
        steps_(request.reduction, context.widens_halves()),
        count_(request.out[0].bytes / steps_.item()),
        per_chunk_(context.chunk() / steps_.wire_item()) {}

  void run() {
    pipeline(
        chunks(count_, per_chunk_), [this](std::size_t k) { begin(k); },
        [this](std::size_t k) {
          const Range part = chunk(count_, per_chunk_, k);
          combine(context_, steps_, shares_[k % 2],
                  request_.out[0].data + part.begin * steps_.item(), part.size());
        });
    for (const Shares& one : shares_) context_.wait(one.sends);
  }

 private:
  void begin(std::size_t k) {
    Shares& s = shares_[k % 2];
    context_.wait(s.sends);
    s = Shares{};
    const std::size_t bytes = chunk(count_, per_chunk_, k).size() * steps_.wire_item();
    const Topology& all = context_.topology();
    for (int host = 0; host < context_.hosts(); ++host) {
      Cargo& one = s.of_hosts.emplace_back(context_.allocate(bytes));
      if (host == context_.host()) continue;
      context_.receive(all.rank_at(host, context_.index() % all.ranks_on(host)), one,
                       number_of(k, 0));
    }
    s.receives = context_.receives();
    for (int step = 0; step < context_.hosts(); ++step) {
      const int host = (context_.host() + step) % context_.hosts();
      for (int index = 0; index < all.ranks_on(host); ++index) {
        add_up(k, all.rank_at(host, index), s.of_hosts[static_cast<std::size_t>(host)]);
      }
    }
    context_.depart(number_of(k, 0));
    s.sends = context_.sends();
  }

  /// Adds up this host's share of `rank`'s block. Into `own` if it is this rank's.
  void add_up(std::size_t k, int rank, const Cargo& own) {
    const Range part = chunk(count_, per_chunk_, k);
    const Cargo wide = context_.widened(
        steps_, request_.in[static_cast<std::size_t>(rank)].data + part.begin * steps_.item(),
        part.size());
    const int root = context_.stand_in(rank);
    const bool collects = root == context_.index();
    const bool sends = collects && rank != context_.rank();
    const Cargo sum = sends ? context_.allocate(part.size() * steps_.wire_item()) : own;
    const Block in{wide.data(), part.size() * steps_.wire_item()};
    const Block out{sum.data(), in.bytes};
    context_.run_on_host(Kind::kReduce, steps_.here, {&in, 1}, {&out, collects ? 1U : 0U}, root);
    if (sends) context_.send(rank, sum, number_of(k, 0));
  }

  HierContext& context_;
  const Request& request_;
  const TwoStepReduction steps_;
  const std::size_t count_;
  const std::size_t per_chunk_;  // elements
  std::array<Shares, 2> shares_;
};

}  // namespace

void reduce(HierContext& context, const Request& request) { Reduce(context, request).run(); }
void reduce_scatter(HierContext& context, const Request& request) {
  ReduceScatter(context, request).run();
}

}  // namespace dreamcomm::internode

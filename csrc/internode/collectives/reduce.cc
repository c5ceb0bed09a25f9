// reduce and reduce_scatter: what each host's ranks add up to goes to whom it is for, who combines
// it in the order of the hosts.
#include <array>
#include <utility>
#include <vector>

#include "core/schedule.h"
#include "internode/collectives/dispatch.h"
#include "internode/collectives/two_step_reduction.h"

namespace dreamcomm::spans {
namespace {

/// What the hosts' ranks have, host by host: their messages, or this rank's own.
struct Shares {
  std::vector<Cargo> of_hosts;
  Trip::Transfers receives;
  Trip::Transfers sends;
};

void combine(Trip& trip, const Steps& steps, Shares& shares, std::byte* out, std::size_t count) {
  trip.wait(shares.receives);
  std::vector<const std::byte*> sources;
  for (const Cargo& one : shares.of_hosts) sources.push_back(one.data());
  trip.combine(steps, sources, out, count);
}

/// Each carrier of the root's host combines a shard of a chunk; the root collects them.
class Reduce {
 public:
  Reduce(Trip& trip, const Request& request)
      : trip_(trip),
        request_(request),
        steps_(request.reduction, trip.widens_halves()),
        count_(request.in[0].bytes / steps_.item()),
        per_chunk_(trip.chunk() / steps_.wire_item()),
        carriers_(trip.carriers()),
        home_(trip.topology().host_of(request.root)) {}

  void run() {
    pipeline(
        chunks(count_, per_chunk_), [this](std::size_t k) { begin(k); },
        [this](std::size_t k) { end(k); });
    for (const Shares& one : shares_) trip_.wait(one.sends);
  }

 private:
  Range elements(std::size_t k) const { return chunk(count_, per_chunk_, k); }
  Range shard_of(std::size_t k, int carrier) const {
    return shard(elements(k).size(), carriers_, carrier);
  }
  bool is_home() const { return trip_.host() == home_; }

  void begin(std::size_t k) {
    Shares& s = shares_[k % 2];
    trip_.wait(s.sends);
    s = Shares{};
    const std::size_t bytes =
        trip_.carries() ? shard_of(k, trip_.index()).size() * steps_.wire_item() : 0;
    s.of_hosts.resize(static_cast<std::size_t>(trip_.hosts()));
    for (int host = 0; trip_.carries() && host < trip_.hosts(); ++host) {
      Cargo& one = s.of_hosts[static_cast<std::size_t>(host)];
      if (is_home() || host == trip_.host()) one = trip_.room(bytes);
      if (!is_home() || host == trip_.host()) continue;
      trip_.receive(trip_.partner(host), one, number_of(k, 0));
    }
    s.receives = trip_.receives();
    const Range part = elements(k);
    const Cargo wide =
        trip_.widened(steps_, request_.in[0].data + part.begin * steps_.item(), part.size());
    const Cargo& own = s.of_hosts[static_cast<std::size_t>(trip_.host())];
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      const Range r = shard_of(k, carrier);
      const Block in{wide.data() + r.begin * steps_.wire_item(), r.size() * steps_.wire_item()};
      const Block out{own.data(), own.bytes};
      trip_.here(Kind::kReduce, steps_.here, {&in, 1}, {&out, carrier == trip_.index() ? 1U : 0U},
                 carrier);
    }
    if (trip_.carries() && !is_home()) trip_.send(trip_.partner(home_), own, number_of(k, 0));
    trip_.depart(number_of(k, 0));
    s.sends = trip_.sends();
  }

  void end(std::size_t k) {
    if (!is_home()) return;
    const Cargo done = trip_.room(per_chunk_ * steps_.item());
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      const Range r = shard_of(k, carrier);
      const bool own = carrier == trip_.index();
      if (own) combine(trip_, steps_, shares_[k % 2], done.data(), r.size());
      // The others need it as little as the root does its own.
      std::byte* target = done.data();
      if (trip_.rank() == request_.root) {
        target = request_.out[0].data + (elements(k).begin + r.begin) * steps_.item();
      }
      const Block in{done.data(), r.size() * steps_.item()};
      const Block out{target, r.size() * steps_.item()};
      trip_.here(Kind::kBroadcast, {.dtype = steps_.type}, {&in, own ? 1U : 0U}, {&out, 1},
                 carrier);
    }
  }

  Trip& trip_;
  const Request& request_;
  const Steps steps_;
  const std::size_t count_;
  const std::size_t per_chunk_;  // elements
  const int carriers_;
  const int home_;  // the root's host
  std::array<Shares, 2> shares_;
};

/// A host's share of a rank's block is added up at that rank's stand-in there, who sends it.
class ReduceScatter {
 public:
  ReduceScatter(Trip& trip, const Request& request)
      : trip_(trip),
        request_(request),
        steps_(request.reduction, trip.widens_halves()),
        count_(request.out[0].bytes / steps_.item()),
        per_chunk_(trip.chunk() / steps_.wire_item()) {}

  void run() {
    pipeline(
        chunks(count_, per_chunk_), [this](std::size_t k) { begin(k); },
        [this](std::size_t k) {
          const Range part = chunk(count_, per_chunk_, k);
          combine(trip_, steps_, shares_[k % 2], request_.out[0].data + part.begin * steps_.item(),
                  part.size());
        });
    for (const Shares& one : shares_) trip_.wait(one.sends);
  }

 private:
  void begin(std::size_t k) {
    Shares& s = shares_[k % 2];
    trip_.wait(s.sends);
    s = Shares{};
    const std::size_t bytes = chunk(count_, per_chunk_, k).size() * steps_.wire_item();
    const Topology& all = trip_.topology();
    for (int host = 0; host < trip_.hosts(); ++host) {
      Cargo& one = s.of_hosts.emplace_back(trip_.room(bytes));
      if (host == trip_.host()) continue;
      trip_.receive(all.rank_at(host, trip_.index() % all.ranks_on(host)), one, number_of(k, 0));
    }
    s.receives = trip_.receives();
    for (int step = 0; step < trip_.hosts(); ++step) {
      const int host = (trip_.host() + step) % trip_.hosts();
      for (int index = 0; index < all.ranks_on(host); ++index) {
        add_up(k, all.rank_at(host, index), s.of_hosts[static_cast<std::size_t>(host)]);
      }
    }
    trip_.depart(number_of(k, 0));
    s.sends = trip_.sends();
  }

  /// This host's share of `rank`'s block. Into `own` if it is this rank's.
  void add_up(std::size_t k, int rank, const Cargo& own) {
    const Range part = chunk(count_, per_chunk_, k);
    const Cargo wide = trip_.widened(
        steps_, request_.in[static_cast<std::size_t>(rank)].data + part.begin * steps_.item(),
        part.size());
    const int root = trip_.stand_in(rank);
    const bool collects = root == trip_.index();
    const bool sends = collects && rank != trip_.rank();
    const Cargo sum = sends ? trip_.room(part.size() * steps_.wire_item()) : own;
    const Block in{wide.data(), part.size() * steps_.wire_item()};
    const Block out{sum.data(), in.bytes};
    trip_.here(Kind::kReduce, steps_.here, {&in, 1}, {&out, collects ? 1U : 0U}, root);
    if (sends) trip_.send(rank, sum, number_of(k, 0));
  }

  Trip& trip_;
  const Request& request_;
  const Steps steps_;
  const std::size_t count_;
  const std::size_t per_chunk_;  // elements
  std::array<Shares, 2> shares_;
};

}  // namespace

void reduce(Trip& trip, const Request& request) { Reduce(trip, request).run(); }
void reduce_scatter(Trip& trip, const Request& request) { ReduceScatter(trip, request).run(); }

}  // namespace dreamcomm::spans

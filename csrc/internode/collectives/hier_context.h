// The context of one collective on both levels of a multi-node group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/group_communicator.h"
#include "core/record.h"
#include "core/request.h"
#include "internode/collectives/two_step_reduction.h"
#include "transport/link.h"
#include "transport/topology.h"

namespace dreamcomm {

/// The operations that the algorithms between hosts (internode/collectives/dispatch.h) are written
/// against. Addresses belong to the level that a subclass serves: to the host's memory, or a
/// device's.
class HierContext {
 public:
  /// A tensor moves `chunk` bytes at a time; `topology` must outlive the context.
  HierContext(const Topology& topology, int rank, std::size_t chunk, bool widens_halves)
      : topology_(topology), rank_(rank), chunk_(chunk), widens_halves_(widens_halves) {}
  virtual ~HierContext() = default;
  HierContext(const HierContext&) = delete;
  HierContext& operator=(const HierContext&) = delete;

  const Topology& topology() const { return topology_; }
  int rank() const { return rank_; }
  int size() const { return topology().size(); }
  int hosts() const { return topology().hosts(); }
  int host() const { return topology().host_of(rank()); }
  int index() const { return topology().index_of(rank()); }
  int ranks_here() const { return topology().ranks_on(host()); }
  /// The ranks that carry shares between hosts: the first so many of each host.
  int carriers() const { return topology().carriers(); }
  bool carries() const { return index() < carriers(); }
  /// The carrier of another host that is this one's counterpart.
  int partner(int host) const { return topology().rank_at(host, index()); }
  /// Calls `each` for the other hosts, beginning with the next, so that hosts do not all begin with
  /// the same.
  template <typename Each>
  void for_other_hosts(Each&& each) const {
    for (int step = 1; step < hosts(); ++step) each((host() + step) % hosts());
  }
  bool widens_halves() const { return widens_halves_; }
  /// The rank of this host, by its local index, that takes another rank's share of this host.
  int stand_in(int rank) const { return topology().index_of(rank) % ranks_here(); }

  /// Bytes of a tensor that are moved at a time, as sent on the wire.
  std::size_t chunk() const { return chunk_; }

  /// A collective among the ranks of this host; `root` by its local index.
  virtual void run_on_host(Kind kind, const Reduction& how, std::span<const Block> in,
                           std::span<const Block> out, int root = 0) = 0;

  /// Memory of undefined content that lives as long as anything uses it.
  virtual Cargo allocate(std::size_t bytes) const = 0;
  /// The caller's bytes in a form that a message can keep: its engine may outlive the call.
  virtual Cargo keep(const Block& block) = 0;
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  /// `count` elements of a tensor in the type in which they are added up: in place, or in the
  /// context's memory.
  virtual Cargo widened(const TwoStepReduction& steps, std::byte* in, std::size_t count) = 0;
  /// Combines what the hosts have, in their order, into `count` elements of a tensor.
  virtual void combine(const TwoStepReduction& steps, std::span<const std::byte* const> of_hosts,
                       std::byte* out, std::size_t count) = 0;

  /// Messages to and from ranks of other hosts, numbered within the call. Equal numbers of two
  /// ranks are not under way together. A message of no bytes is not sent.
  virtual void send(int rank, const Cargo& cargo, std::uint32_t number) = 0;
  virtual void receive(int rank, const Cargo& cargo, std::uint32_t number) = 0;
  /// All messages of that number have been named: an engine that takes many at a time starts them
  /// now. INVARIANT: the messages between any two ranks depart in one order of numbers.
  virtual void depart(std::uint32_t number) = 0;

  /// Messages that have begun and were not collected yet.
  struct Transfer {
    std::shared_ptr<Parcel> parcel;
    int rank;
  };
  using Transfers = std::vector<Transfer>;
  virtual Transfers sends() = 0;
  virtual Transfers receives() = 0;
  /// Waits until all have arrived. Throws Error.
  virtual void wait(const Transfers& transfers) = 0;

  const WireTraffic& traffic() const { return traffic_; }

 protected:
  WireTraffic traffic_;

 private:
  const Topology& topology_;
  const int rank_;
  const std::size_t chunk_;
  const bool widens_halves_;
};

}  // namespace dreamcomm

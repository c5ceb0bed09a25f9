// One collective's way through both levels of a group that spans hosts.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/error.h"
#include "core/flag.h"
#include "core/request.h"
#include "span/nudger.h"
#include "span/vigil.h"
#include "transport/heap.h"
#include "transport/link.h"
#include "transport/topology.h"

namespace dreamcomm {

/// How ranks of different hosts learn of each other's reasons to give a group up.
struct Reasons {
  /// Of this rank; the last one counts. May be null.
  std::function<void(const std::string& reason)> tell{};
  /// What a rank has told so far, for which it has a moment, or ""; may be null.
  std::function<std::string(int rank, std::chrono::milliseconds moment)> told{};

  static constexpr std::chrono::milliseconds kMoment{160};
  std::string of(int rank, std::chrono::milliseconds moment = kMoment) const {
    const std::string reason = told ? told(rank, moment) : "";
    return reason.empty() ? "" : concat("rank ", rank, " has given the group up: ", reason);
  }
};

/// What a rank of such a group has, made once.
struct Levels {
  Communicator& host;  // the ranks of this one's host
  const Topology& topology;
  Link& link;
  Nudger& nudger;
  Vigil& vigil;
  const std::shared_ptr<Heap>& heap;  // of this process; null: none
  /// Whether a call within the host has failed, in which a late peer may still write.
  std::shared_ptr<Mark> spoilt;
  const Reasons& reasons;
  int rank;  // in the group
  bool widens_halves;
};

/// Bytes between hosts, of this rank.
struct WireTraffic {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
};

class Trip {
 public:
  /// `number` counts the group's calls; `chunk` bytes of a tensor go at a time. All references must
  /// outlive the trip.
  Trip(const Levels& levels, const Request& request, std::uint64_t number, std::size_t chunk,
       const Interrupt& interrupt);

  const Topology& topology() const { return levels_.topology; }
  int rank() const { return levels_.rank; }
  int size() const { return topology().size(); }
  int hosts() const { return topology().hosts(); }
  int host() const { return topology().host_of(rank()); }
  int index() const { return topology().index_of(rank()); }
  int ranks_here() const { return topology().ranks_on(host()); }
  /// The ranks that carry shares between hosts: the first so many of each.
  int carriers() const { return topology().carriers(); }
  bool carries() const { return index() < carriers(); }
  /// The carrier of another host that is this one's equal there.
  int partner(int host) const { return topology().rank_at(host, index()); }
  /// Beginning with the next one, so that hosts do not all begin with the same.
  template <typename Each>
  void for_other_hosts(Each&& each) const {
    for (int step = 1; step < hosts(); ++step) each((host() + step) % hosts());
  }
  bool widens_halves() const { return levels_.widens_halves; }
  /// Where a rank's share of a host is taken to: a rank of this host, by its local index.
  int stand_in(int rank) const { return topology().index_of(rank) % ranks_here(); }

  /// Bytes to take of a tensor at a time, as the wire has it.
  std::size_t chunk() const { return chunk_; }

  /// A collective among the ranks of this host; `root` by its local index.
  void here(Kind kind, const Reduction& how, std::span<const Block> in, std::span<const Block> out,
            int root = 0);

  /// Memory of undefined content that lives as long as anybody uses it, in the heap if there is
  /// room. Of the heap it is not used again once a call within the host has failed.
  Cargo room(std::size_t bytes) const;

  /// Messages to and from ranks of other hosts, numbered within the call; equal numbers of two
  /// ranks are not under way together. Of no bytes there are none.
  void send(int rank, const Cargo& cargo, std::uint32_t number);
  void receive(int rank, const Cargo& cargo, std::uint32_t number);

  /// Messages that have begun and were not collected yet.
  struct Transfer {
    std::shared_ptr<Parcel> parcel;
    int rank;
  };
  using Transfers = std::vector<Transfer>;
  Transfers sends();
  Transfers receives();
  /// Until all have come. Throws Error.
  void wait(const Transfers& transfers);

  const WireTraffic& traffic() const { return traffic_; }

 private:
  std::uint32_t tag(std::uint32_t number) const;
  Clock::duration slack() const;
  std::string waiting_for(int rank) const;
  [[noreturn]] void fail_for(int rank, const Error& error) const;
  template <typename Begin>
  std::shared_ptr<Parcel> begun(int rank, Begin&& begin) const;

  const Levels& levels_;
  const Request& request_;
  const std::uint64_t number_;
  const std::size_t chunk_;
  const Interrupt& interrupt_;
  const Clock::time_point begin_ = Clock::now();
  Transfers sends_;
  Transfers receives_;
  WireTraffic traffic_;
};

}  // namespace dreamcomm

// Collectives of a group whose ranks are on several hosts: shared memory inside of each, another
// engine's messages between them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "core/flag.h"
#include "span/nudger.h"
#include "span/trip.h"
#include "transport/link.h"
#include "transport/topology.h"

namespace dreamcomm {

struct BridgeOptions {
  /// As CommOptions::call_site.
  std::function<std::string()> call_site{};
  std::shared_ptr<Heap> heap{};  // of this process; null: none
  std::size_t chunk_bytes = 0;   // of a tensor at a time; 0: as fits
  /// Tells ranks of other hosts why this one gives the group up; may be null.
  std::function<void(const std::string& reason)> tell{};
  /// What a rank that has gone has told, or ""; may be null.
  std::function<std::string(int rank)> told{};
};

/// Order of reductions: the ranks of a host are combined from left to right in rank order, then
/// the hosts' results in the order of the hosts (Topology). 16-bit floating types are computed,
/// and cross the wire, in float32, and are rounded once at the end. So every rank, every run and
/// every size gives the same bits; they are those of one host where each host has one rank.
class Bridge {
 public:
  /// `host` is of the ranks of this one's host, by their local indices, and outlives the span.
  Bridge(Communicator& host, Topology topology, int rank, std::unique_ptr<Link> link,
         BridgeOptions options);
  ~Bridge();
  Bridge(const Bridge&) = delete;
  Bridge& operator=(const Bridge&) = delete;

  /// As Communicator::run_ordered, in a job of the host's communicator; with the group's ranks.
  void run_ordered(const Request& request, const Interrupt& interrupt = {});
  /// Ends the calls under way, with the link; the other hosts' ranks are told why. Any thread.
  void give_up(const std::string& reason);
  /// Ends the link, in good order where no call is under way. Any thread.
  void close();

  const Topology& topology() const { return topology_; }
  /// "2 hosts: ...".
  std::string describe() const;
  /// How a call of so many bytes would go.
  std::string explain(Kind kind, std::size_t bytes) const;
  /// Bytes of this rank between hosts.
  std::array<WireTraffic, kKinds> traffic() const;

 private:
  void run(Trip& trip, const Request& request);

  Communicator& host_;
  const Topology topology_;
  const int rank_;
  const std::unique_ptr<Link> link_;
  const BridgeOptions options_;
  Nudger nudger_;
  const std::shared_ptr<Mark> spoilt_ = std::make_shared<Mark>();
  const Levels levels_;  // of the members before it
  std::uint64_t calls_ = 0;
  Flag told_;  // how often a reason was told: the first is the one
  std::array<Gauge, kKinds> sent_;
  std::array<Gauge, kKinds> received_;
};

}  // namespace dreamcomm

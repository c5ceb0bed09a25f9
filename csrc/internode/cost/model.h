// How long calls between hosts take: what their ways are chosen by.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "algorithms/cost/costs.h"
#include "core/types.h"
#include "internode/cost/corrections.h"

namespace dreamcomm {

/// Of messages between hosts: measured (internode/tuning/measure.h), or described (dreamcomm
/// simulate).
struct WireCosts {
  double latency = 0;        // seconds that a message is under way, of no bytes
  double message = 0;        // seconds of the two ranks for each further one
  double alone = 0;          // seconds per byte that a host sends, where one of its ranks does
  double byte = 0;           // and where all of its carriers do
  double chunk = 0;          // seconds of each chunk of these, beyond its bytes
  double handling = 0;       // seconds per such byte that ranks take, beyond their host's copies
  double overlap = 1;        // of the shorter of both, the wire's part and the ranks'
  Corrections by_leaders{};  // of an all_reduce of so many bytes, and of calls that send as many
  Corrections by_carriers{};

  /// Those of 10 Gbit/s Ethernet, rounded: for choices that do not depend on what was measured.
  static const WireCosts& fixed();
  /// "latency 61 us, 118 MB/s from one rank, ...".
  std::string words() const;

  bool operator==(const WireCosts&) const = default;
};

/// What of a topology the time of a call depends on.
struct Shape {
  int hosts = 1;
  int ranks = 1;     // of the largest host
  int carriers = 1;  // of each
  int size = 1;

  Shape() = default;
  explicit Shape(std::span<const int> ranks_on_hosts);
};

/// Costs within a host, and between hosts.
struct LevelCosts {
  Costs here = Costs::fixed();
  WireCosts between = WireCosts::fixed();
};

/// One way that a call can go, and what it is predicted to take.
struct Way {
  bool leaders = false;   // one rank a host exchanges all, as the call opens
  std::size_t chunk = 0;  // else: bytes of a tensor at a time; 0: of one host
  double seconds = 0;

  bool operator==(const Way&) const = default;
};

/// What a host may bring to the opening of a call, for which all leaders keep room.
std::size_t most_brought(int hosts);

/// Seconds of a call that goes that way.
double predict(Kind kind, std::size_t bytes, const Way& way, const Shape& shape,
               const LevelCosts& costs);

/// The ways of a call, of which there is one at least; `bytes` of one block (of all_to_all: that a
/// rank gives to all), as the wire has it. Pure: equal arguments give equal ways on all ranks.
std::vector<Way> ways(Kind kind, std::size_t bytes, const Shape& shape, const LevelCosts& costs);

/// Seconds of an all_reduce by one ring over all ranks, as libraries do it that know no hosts: 2 (N
/// - 1) steps of an Nth each, all as slow as the slower of an edge between two hosts and one
/// within.
double flat_ring(std::size_t bytes, const Shape& shape, const LevelCosts& costs);

/// The one with the least time; leaders, who need the fewest messages, unless another takes more
/// than 3 % less: of 1 MiB on 1 Gbit/s carriers, whose stages overlap, win by 5 %.
Way best_way(Kind kind, std::size_t bytes, const Shape& shape, const LevelCosts& costs);

}  // namespace dreamcomm

// How long calls between hosts take: the basis for choosing their ways.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "algorithms/cost/costs.h"
#include "core/types.h"
#include "internode/cost/corrections.h"

namespace dreamcomm {

/// The costs of messages between hosts: measured (internode/tuning/measure.h), or described
/// (dreamcomm simulate).
struct WireCosts {
  double latency = 0;   // seconds that a message is under way, of no bytes
  double message = 0;   // seconds of the two ranks for each further message
  double alone = 0;     // seconds per byte that a host sends, if one of its ranks sends
  double byte = 0;      // the same, if all of its carriers send
  double chunk = 0;     // seconds of each chunk of the carriers, beyond its bytes
  double handling = 0;  // seconds of the ranks per such byte, beyond their host's copies
  double overlap =
      1;  // share of the shorter of both, the wire's part and the ranks', that is hidden
  Corrections by_leaders{};  // for an all_reduce of so many bytes, and calls that send as many
  Corrections by_carriers{};

  /// The rounded costs of 10 Gbit/s Ethernet: for choices that do not depend on measurements.
  static const WireCosts& fixed();
  /// "latency 61 us, 118 MB/s from one rank, ...".
  std::string words() const;

  bool operator==(const WireCosts&) const = default;
};

/// The properties of a topology on which the time of a call depends.
struct Shape {
  int hosts = 1;
  int ranks = 1;     // of the largest host
  int carriers = 1;  // of each host
  int size = 1;

  Shape() = default;
  explicit Shape(std::span<const int> ranks_on_hosts);
};

/// Costs within a host, and between hosts.
struct LevelCosts {
  Costs here = Costs::fixed();
  WireCosts between = WireCosts::fixed();
};

/// One way in which a call can run, and its predicted time.
struct Way {
  bool leaders = false;   // one rank of each host exchanges all, as the call opens
  std::size_t chunk = 0;  // otherwise: bytes of a tensor at a time; 0: the group has one host
  double seconds = 0;

  bool operator==(const Way&) const = default;
};

/// The most that a host may bring to the opening of a call; all leaders keep room for it.
std::size_t most_brought(int hosts);

/// Predicts the seconds of a call that runs this way.
double predict(Kind kind, std::size_t bytes, const Way& way, const Shape& shape,
               const LevelCosts& costs);

/// Returns the ways of a call, at least one. `bytes` of one block (of all_to_all: that a rank gives
/// to all), as sent on the wire. Pure: equal arguments give equal ways on all ranks.
std::vector<Way> ways(Kind kind, std::size_t bytes, const Shape& shape, const LevelCosts& costs);

/// Seconds of an all_reduce by one ring over all ranks, as in libraries that ignore hosts: 2 (N -
/// 1) steps of an Nth each, each as slow as the slower of an edge between two hosts and one within
/// a host.
double flat_ring(std::size_t bytes, const Shape& shape, const LevelCosts& costs);

/// Returns the way with the least time. By leaders, which needs the fewest messages, is taken
/// unless another way takes more than 3 % less: for 1 MiB on 1 Gbit/s, carriers, whose stages
/// overlap, win by 5 %.
Way best_way(Kind kind, std::size_t bytes, const Shape& shape, const LevelCosts& costs);

}  // namespace dreamcomm

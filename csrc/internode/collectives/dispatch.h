// The algorithms between hosts, which run after a call was opened: one function per kind.
#pragma once

#include <cstddef>

#include "internode/collectives/hier_context.h"

namespace dreamcomm::internode {

/// Runs the algorithm of the request; a barrier has none.
void run(HierContext& context, const Request& request);

void all_reduce(HierContext& context, const Request& request);
void reduce(HierContext& context, const Request& request);
void reduce_scatter(HierContext& context, const Request& request);
void all_gather(HierContext& context, const Request& request);
void broadcast(HierContext& context, const Request& request);
void gather(HierContext& context, const Request& request);
void scatter(HierContext& context, const Request& request);
void all_to_all(HierContext& context, const Request& request);

/// Chunks under way at a time: one is combined here, one is on the wire, one is spread here.
inline constexpr std::size_t kDepth = 3;

/// Runs begin(k) for all of `total` chunks, each before end(k - 1).
template <typename Begin, typename End>
void pipeline(std::size_t total, Begin&& begin, End&& end) {
  for (std::size_t k = 0; k < total + 1; ++k) {
    if (k < total) begin(k);
    if (k > 0) end(k - 1);
  }
}

/// The number of message `phase` of chunk `k`. Numbers repeat when those chunks have long arrived.
constexpr std::uint32_t number_of(std::size_t k, std::uint32_t phase) {
  return static_cast<std::uint32_t>(k % 0x7000) * 2 + phase;
}

}  // namespace dreamcomm::internode

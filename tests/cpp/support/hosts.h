// Multi-node groups of threads, and links of threads between the nodes.
#pragma once

#include <functional>
#include <vector>

#include "internode/hier_communicator.h"

namespace dreamcomm::testing {

using Hosts = std::vector<std::vector<int>>;  // the ranks of each host

int size_of(const Hosts& hosts);

/// The limit is so low that calls take both ways.
Way as_tested(Kind kind, std::size_t bytes);

using Body = std::function<void(Communicator& host, HierarchicalCommunicator& hier, int rank)>;

/// Runs `body` as every rank; throws the texts of all ranks that threw.
void run_hosts(const Hosts& hosts, const Body& body, std::size_t page_bytes = 64 << 10,
               const std::function<Way(Kind, std::size_t)>& choose = as_tested);

extern const std::vector<Hosts> kPlaces;

}  // namespace dreamcomm::testing

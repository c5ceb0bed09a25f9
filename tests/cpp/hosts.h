// Groups of threads that span hosts, and links of threads between these.
#pragma once

#include <functional>
#include <vector>

#include "internode/hier_communicator.h"

namespace dreamcomm::testing {

using Hosts = std::vector<std::vector<int>>;  // the ranks of each

int size_of(const Hosts& hosts);

/// Little enough that both ways are gone.
Way as_tested(Kind kind, std::size_t bytes);

using Body = std::function<void(Communicator& host, HierarchicalCommunicator& hier, int rank)>;

/// Runs `body` as every rank; throws with the texts of those that threw.
void run_hosts(const Hosts& hosts, const Body& body, std::size_t page_bytes = 64 << 10,
               const std::function<Way(Kind, std::size_t)>& choose = as_tested);

extern const std::vector<Hosts> kPlaces;

}  // namespace dreamcomm::testing

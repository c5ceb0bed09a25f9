#include "transport/topology.h"

#include <algorithm>

#include "core/error.h"

namespace dreamcomm {

Topology::Topology(std::span<const std::string> shared, std::span<const std::string> names) {
  const auto says = [&](int a, int b) {
    return shared[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)] == '1';
  };
  for (int rank = 0; rank < static_cast<int>(shared.size()); ++rank) {
    const auto fits = [&](const std::vector<int>& host) {
      return std::all_of(host.begin(), host.end(),
                         [&](int other) { return says(rank, other) && says(other, rank); });
    };
    auto host = std::find_if(hosts_.begin(), hosts_.end(), fits);
    if (host == hosts_.end()) {
      host = hosts_.insert(host, std::vector<int>());
      names_.push_back(names[static_cast<std::size_t>(rank)]);
    }
    places_.push_back({static_cast<int>(host - hosts_.begin()), static_cast<int>(host->size())});
    host->push_back(rank);
  }
}

std::vector<int> Topology::ranks_on_hosts() const {
  std::vector<int> counts;
  for (int host = 0; host < hosts(); ++host) counts.push_back(ranks_on(host));
  return counts;
}

int Topology::carriers() const {
  std::size_t least = places_.size();
  for (const std::vector<int>& host : hosts_) least = std::min(least, host.size());
  return static_cast<int>(least);
}

std::string Topology::words(int host) const {
  std::string list;
  for (const int rank : ranks(host)) list += concat(list.empty() ? "" : ", ", rank);
  return concat("host ", names_[static_cast<std::size_t>(host)], " (rank",
                ranks_on(host) == 1 ? " " : "s ", list, ")");
}

std::string Topology::words() const {
  std::string list;
  for (int host = 0; host < hosts(); ++host) list += concat(host == 0 ? "" : ", ", words(host));
  return list;
}

}  // namespace dreamcomm

// Which ranks of a group share memory: its hosts.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace dreamcomm {

/// A host is ranks that all map each other's memory: those of one machine and user, unless
/// containers keep them apart. Hosts are in the order of their lowest ranks, a host's ranks in
/// ascending order; a rank's place among them is its local index.
class Topology {
 public:
  Topology() = default;  // of no ranks
  /// `shared[a][b]` is '1' if rank a says that it maps rank b's memory; a pair counts if both say
  /// so. `names` are the names of the ranks' machines. A rank joins the first host with all of
  /// whose ranks it shares memory.
  Topology(std::span<const std::string> shared, std::span<const std::string> names);

  int size() const { return static_cast<int>(places_.size()); }
  int hosts() const { return static_cast<int>(hosts_.size()); }
  int host_of(int rank) const { return places_[static_cast<std::size_t>(rank)].host; }
  int index_of(int rank) const { return places_[static_cast<std::size_t>(rank)].index; }
  std::span<const int> ranks(int host) const { return hosts_[static_cast<std::size_t>(host)]; }
  int rank_at(int host, int index) const {
    return hosts_[static_cast<std::size_t>(host)][static_cast<std::size_t>(index)];
  }
  int ranks_on(int host) const { return static_cast<int>(ranks(host).size()); }
  /// Ranks of the smallest host: this many ranks of each host can carry an equal share between
  /// hosts.
  int carriers() const;
  std::vector<int> ranks_on_hosts() const;
  const std::string& name(int host) const { return names_[static_cast<std::size_t>(host)]; }
  /// "host alpha (ranks 0, 1)".
  std::string words(int host) const;
  /// All hosts, in words.
  std::string words() const;

 private:
  struct Place {
    int host = 0;
    int index = 0;
  };
  std::vector<std::vector<int>> hosts_;
  std::vector<std::string> names_;  // of the hosts
  std::vector<Place> places_;       // of the ranks
};

}  // namespace dreamcomm

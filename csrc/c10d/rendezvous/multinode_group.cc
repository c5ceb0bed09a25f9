#include "c10d/rendezvous/multinode_group.h"

#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/rendezvous/liveness.h"
#include "c10d/rendezvous/torch_store.h"
#include "core/error.h"
#include "core/request.h"

namespace dreamcomm {

namespace {

std::string telling_key(int rank) { return concat("told-of/", rank); }
constexpr const char* kLastToldKey = "told-of/any";

constexpr std::chrono::milliseconds kBetween{40};  // looks

}  // namespace

ShmResult connect_host(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                       const ShmOptions& found_by, const ShmResult& whole) {
  ShmOptions options = found_by;
  options.hosts.clear();
  options.on_hosts = nullptr;
  options.group = concat("the part on ", place.topology.words(place.host()), " of ", options.group);
  const std::span<const int> ranks = place.topology.ranks(place.host());
  options.numbers = RankNumbering({ranks.begin(), ranks.end()}, place.topology.size());
  if (found_by.will_not_come) {
    options.will_not_come = [why = found_by.will_not_come,
                             of_group = std::vector<int>(ranks.begin(), ranks.end())](int index) {
      return why(of_group[static_cast<std::size_t>(index)]);
    };
  }
  TorchStore meeting(c10::make_intrusive<c10d::PrefixStore>(concat("host/", place.host()), store));
  ShmResult result =
      connect_shm(meeting, place.index(), place.topology.ranks_on(place.host()), options);
  check(result.fabric != nullptr, ErrorKind::kSystem, "the ranks of ",
        place.topology.words(place.host()),
        " mapped each other's memory, and then could not: ", result.reason);
  result.fabric->number_as({ranks.begin(), ranks.end()}, place.topology.size(), whole.team);
  return result;
}

std::shared_ptr<Recorder> recorder_of_hosts(const std::shared_ptr<Recorder>& parts,
                                            const Place& place, const std::vector<int>& members) {
  const Topology& topology = place.topology;
  Recorder::Origin origin{.team = parts->origin().team,
                          .group = parts->origin().group,
                          .rank = place.rank,
                          .size = topology.size(),
                          .world_ranks = members};
  for (int host = 0; host < topology.hosts(); ++host) {
    const std::span<const int> ranks = topology.ranks(host);
    origin.hosts.push_back({topology.name(host), {ranks.begin(), ranks.end()}});
  }
  const std::vector<int>& numbers = origin.hosts[static_cast<std::size_t>(place.host())].ranks;
  return Recorder::of_hosts(origin, parts, numbers);
}

std::string map_of_hosts(const Topology& topology, const std::vector<std::string>& apart) {
  std::string text;
  for (int host = 0; host < topology.hosts(); ++host) {
    std::string ranks;
    std::string why;
    for (const int rank : topology.ranks(host)) {
      ranks +=
          concat(ranks.empty() ? "" : ", ", "rank ", rank, " is local ", topology.index_of(rank));
      if (why.empty()) why = apart.at(static_cast<std::size_t>(rank));
    }
    text += concat("\n  host ", topology.name(host), ": ", ranks,
                   topology.ranks_on(host) > 1 ? "; they map each other's memory" : "; alone",
                   why.empty() ? "" : concat(", and no other host's: ", why));
  }
  return text;
}

std::vector<int> members_on_host(const std::vector<int>& members, const Place& place) {
  std::vector<int> on_host;
  for (const int rank : place.topology.ranks(place.host())) {
    on_host.push_back(members.empty() ? rank : members.at(static_cast<std::size_t>(rank)));
  }
  return on_host;
}

AbortReasons reasons_through(const std::shared_ptr<StoreWorker>& worker) {
  const auto tell = [worker](int rank, const std::string& words) {
    worker->post(kLastToldKey, words);
    worker->set(telling_key(rank), words);
    if (const std::shared_ptr<Liveness> job = liveness()) job->tell_of_host();
  };
  const auto told = [worker](int peer, std::chrono::milliseconds moment) -> std::string {
    const Clock::time_point until = Clock::now() + moment;
    while (true) {
      std::string found = worker->read(telling_key(peer)).value_or("");
      if (!found.empty() || Clock::now() + kBetween > until) return found;
      std::this_thread::sleep_for(kBetween);
    }
  };
  const auto told_last = [worker] { return worker->read(kLastToldKey).value_or(""); };
  return {tell, told, told_last, [worker] { return worker->patience(); }};
}

}  // namespace dreamcomm

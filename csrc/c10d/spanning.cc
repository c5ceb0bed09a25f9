#include "c10d/spanning.h"

#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/store.h"
#include "core/error.h"
#include "core/signals.h"

namespace dreamcomm {

namespace {

std::string key_of(int rank) { return concat("given-up/", rank); }

constexpr std::chrono::milliseconds kBetween{40};  // looks
constexpr std::chrono::milliseconds kSlow{500};    // for the answers of a store that is there

/// As TorchStore::get, which is for threads that may handle Python's signals.
std::string look_for_reason(c10d::Store& store, int rank, std::chrono::milliseconds moment) {
  try {
    for (std::chrono::milliseconds past{0}; past <= moment; past += kBetween) {
      if (past.count() > 0) std::this_thread::sleep_for(kBetween);
      if (store.check({key_of(rank)})) return store.get_to_str(key_of(rank));
    }
  } catch (const std::exception&) {  // it has gone with the rank that kept it
  }
  return "";
}

}  // namespace

ShmResult connect_host(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                       const ShmOptions& whole) {
  ShmOptions options = whole;
  options.hosts.clear();
  const std::span<const int> ranks = place.topology.ranks(place.host());
  if (whole.has_ended) {
    options.has_ended = [ended = whole.has_ended,
                         of_group = std::vector<int>(ranks.begin(), ranks.end())](int index) {
      return ended(of_group[static_cast<std::size_t>(index)]);
    };
  }
  TorchStore meeting(c10::make_intrusive<c10d::PrefixStore>(concat("host/", place.host()), store));
  ShmResult result =
      connect_shm(meeting, place.index(), place.topology.ranks_on(place.host()), options);
  check(result.fabric != nullptr, ErrorKind::kSystem, "the ranks of ",
        place.topology.words(place.host()),
        " mapped each other's memory, and then could not: ", result.reason);
  result.fabric->number_as({ranks.begin(), ranks.end()}, place.topology.size());
  return result;
}

std::vector<int> members_on_host(const std::vector<int>& members, const Place& place) {
  std::vector<int> on_host;
  for (const int rank : place.topology.ranks(place.host())) {
    on_host.push_back(members.empty() ? rank : members.at(static_cast<std::size_t>(rank)));
  }
  return on_host;
}

std::function<void(const std::string& reason)> tell_reason(
    const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  return [store, rank](const std::string& reason) {
    try {
      store->set(key_of(rank), reason);
    } catch (const std::exception&) {  // it has gone with the rank that kept it
    }
  };
}

std::function<std::string(int rank, std::chrono::milliseconds moment)> told_reason(
    const c10::intrusive_ptr<c10d::Store>& store) {
  return [store](int rank, std::chrono::milliseconds moment) -> std::string {
    const auto answer = std::make_shared<std::promise<std::string>>();
    std::future<std::string> told = answer->get_future();
    // Not here: a store whose host has vanished is waited for without end.
    std::thread([store, rank, moment, answer] {
      block_signals();
      answer->set_value(look_for_reason(*store, rank, moment));
    }).detach();
    const bool answered = told.wait_for(moment + kSlow) == std::future_status::ready;
    return answered ? told.get() : "";
  };
}

}  // namespace dreamcomm

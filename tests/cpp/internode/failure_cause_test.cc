// Why ranks of other hosts are lost: by their own reports, or by the ranks whose connections have
// ended.
#include "internode/liveness/failure_cause.h"

#include <doctest.h>

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpp/support/local_link.h"
#include "internode/liveness/aborted_peers.h"

namespace dreamcomm::testing {
namespace {

/// Five ranks, each alone on its host.
Topology five_hosts() {
  std::vector<std::string> maps(5, "00000");
  std::vector<std::string> names;
  for (std::size_t r = 0; r < maps.size(); ++r) {
    maps[r][r] = '1';
    names.push_back(concat('h', r));
  }
  return Topology(maps, names);
}

/// Rank 0 of five, which waits for others, and their reports in a store that takes `a_while` to
/// answer a query.
struct Waiting {
  /// The aborted ranks among these, once the next query is due.
  std::vector<int> next_among(const std::vector<int>& ranks) {
    std::this_thread::sleep_for(AbortedPeers::kBetween);
    return aborted.among(ranks, Clock::time_point::max());
  }

  std::map<int, std::string> told;
  int asked = 0;
  std::chrono::milliseconds a_while{0};
  const std::chrono::milliseconds patience{400};
  const std::vector<std::unique_ptr<Link>> links = make_local_links(5, false);
  const Topology topology = five_hosts();
  WaitInterrupter interrupter;
  ConnectionMonitor monitor{*links[0], interrupter, topology, 0};
  const AbortReasons reasons{
      .told =
          [this](int rank, std::chrono::milliseconds) {
            ++asked;
            std::this_thread::sleep_for(a_while);
            return told.count(rank) > 0 ? told[rank] : std::string();
          },
      .told_last = [this] { return told.empty() ? "" : told.begin()->second; },
      .patience = [this] { return patience; }};
  const FailureCause causes{reasons, monitor};
  AbortedPeers aborted{causes};
};

}  // namespace

TEST_CASE("internode: for a rank without a report, the other lost ranks are the cause") {
  const std::vector<std::unique_ptr<Link>> links = make_local_links(5, false);
  const Topology topology = five_hosts();
  WaitInterrupter interrupter;
  ConnectionMonitor monitor(*links[0], interrupter, topology, 0);
  AbortReasons reasons;
  reasons.told = [](int rank, std::chrono::milliseconds) {
    return std::string(rank == 3 ? "rank 3 has aborted the group: Ctrl-C" : "");
  };
  const FailureCause causes(reasons, monitor);
  CHECK(causes.others() == "");
  CHECK(causes.of(1, "closed") == "closed");
  links[2]->close();
  links[3]->close();
  links[1]->close();
  CHECK(causes.of(1, "closed") ==
        "closed; rank 2 has closed its link; rank 3 has aborted the group: Ctrl-C");
  CHECK(causes.of(3, "closed") == "rank 3 has aborted the group: Ctrl-C");
}

TEST_CASE("internode: a rank that aborts and still runs is lost one query after it was found") {
  Waiting waiting;
  const std::vector<int> ranks = {1, 2, 3};
  CHECK(waiting.next_among(ranks).empty());
  CHECK(waiting.asked == 0);  // no rank is queried while there is no report
  waiting.told = {{2, "Ctrl-C"}, {4, "not asked for"}};
  CHECK(waiting.aborted.among(ranks, Clock::time_point::max()).empty());  // not yet due
  CHECK(waiting.next_among(ranks).empty());
  waiting.told[3] = "out of memory";
  CHECK(waiting.next_among(ranks) == std::vector<int>{2});
  CHECK(waiting.next_among({1, 3}).empty());
  CHECK(waiting.next_among({1, 3}) == std::vector<int>{3});
  CHECK(waiting.asked == 5);
}

TEST_CASE("internode: a rank that aborts and still runs is found in a slow store") {
  Waiting waiting;
  waiting.told = {{4, "Ctrl-C"}};
  waiting.a_while = std::chrono::milliseconds(300);
  const std::vector<int> ranks = {1, 2, 3, 4};
  for (int look = 1; look <= 4; ++look) {  // of one rank, because that takes so long
    CHECK(waiting.next_among(ranks).empty());
    CHECK(waiting.asked == look);
  }
  CHECK(waiting.next_among(ranks) == std::vector<int>{4});
}

TEST_CASE("internode: aborted ranks are not searched for if that could last beyond the deadline") {
  Waiting waiting;
  waiting.told = {{1, "Ctrl-C"}};
  const std::vector<int> ranks = {1};
  std::this_thread::sleep_for(AbortedPeers::kBetween);
  CHECK(waiting.aborted.among(ranks, Clock::now() + waiting.patience).empty());
  CHECK(waiting.asked == 0);
  CHECK(waiting.aborted.among(ranks, Clock::now() + 3 * waiting.patience).empty());
  CHECK(waiting.asked == 1);
}

TEST_CASE("internode: lost ranks can be listed while a rank waits") {
  const std::vector<std::unique_ptr<Link>> links = make_local_links(5, false);
  const Topology topology = five_hosts();
  WaitInterrupter interrupter;
  ConnectionMonitor monitor(*links[0], interrupter, topology, 0);
  const Cargo room{std::make_shared<std::byte>(), 0, 1};
  const std::shared_ptr<Parcel> awaited = links[0]->receive(4, room, 1);
  std::thread other([&] {
    while (monitor.lost().empty()) std::this_thread::yield();
    links[4]->close();
  });
  CHECK(!monitor.look(4, *awaited));
  links[2]->close();
  CHECK_THROWS_AS(while (true) monitor.look(4, *awaited), Error);
  other.join();
}

}  // namespace dreamcomm::testing

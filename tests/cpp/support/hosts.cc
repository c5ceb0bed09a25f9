#include "cpp/support/hosts.h"

#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include "cpp/support/local_link.h"
#include "cpp/support/ranks.h"
#include "transport/local_fabric.h"

namespace dreamcomm::testing {

int size_of(const Hosts& hosts) {
  return std::accumulate(hosts.begin(), hosts.end(), 0, [](int sum, const std::vector<int>& host) {
    return sum + static_cast<int>(host.size());
  });
}

namespace {

/// The topology that ranks would have found.
Topology topology_of(const Hosts& hosts) {
  const auto size = static_cast<std::size_t>(size_of(hosts));
  std::vector<std::string> shared(size, std::string(size, '0'));
  std::vector<std::string> names(size);
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    for (const int a : hosts[host]) {
      names[static_cast<std::size_t>(a)] = "h" + std::to_string(host);
      for (const int b : hosts[host]) {
        shared[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)] = '1';
      }
    }
  }
  return Topology(shared, names);
}

}  // namespace

Way as_tested(Kind kind, std::size_t bytes) {
  const bool fits = kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kBroadcast;
  const bool leaders = kind == Kind::kBarrier || (fits && bytes <= (16U << 10));
  return {leaders, 4096, 0};
}

namespace {

/// The posts of the leaders.
struct Posts {
  std::mutex mutex;
  std::map<std::string, std::string> texts;
};

class TestBoard final : public BarrierBoard {
 public:
  TestBoard(std::shared_ptr<Posts> posts, std::vector<std::string> keys)
      : posts_(std::move(posts)), keys_(std::move(keys)) {}

  void post(const std::string& key, const std::string& text) override {
    const std::scoped_lock lock(posts_->mutex);
    posts_->texts[key] = text;
  }
  bool has_news() override { return true; }
  std::vector<std::string> read(std::chrono::milliseconds) override {
    const std::scoped_lock lock(posts_->mutex);
    std::vector<std::string> found;
    for (const std::string& key : keys_) found.push_back(posts_->texts[key]);
    return found;
  }

 private:
  const std::shared_ptr<Posts> posts_;
  const std::vector<std::string> keys_;
};

std::shared_ptr<BarrierBoard> board_of(const std::shared_ptr<Posts>& posts,
                                       const Topology& topology, int rank) {
  if (topology.index_of(rank) != 0) return nullptr;
  return std::make_shared<TestBoard>(posts, InternodeBarrier::keys(topology, rank));
}

}  // namespace

void run_hosts(const Hosts& hosts, const Body& body, std::size_t page_bytes,
               const std::function<Way(Kind, std::size_t)>& choose) {
  const int size = size_of(hosts);
  auto links = make_local_links(size, true);
  auto messages = make_local_links(size, false);
  std::vector<std::unique_ptr<Fabric>> fabrics(static_cast<std::size_t>(size));
  for (const std::vector<int>& host : hosts) {
    auto made = make_local(static_cast<int>(host.size()), {.page_bytes = page_bytes, .heaps = {}});
    for (std::size_t i = 0; i < host.size(); ++i) {
      made[i]->number_as(host, size);
      fabrics[static_cast<std::size_t>(host[i])] = std::move(made[i]);
    }
  }
  const auto posts = std::make_shared<Posts>();
  std::mutex mutex;
  std::string failures;
  const auto run = [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    try {
      const auto host = std::make_shared<Communicator>(
          std::move(fabrics[index]), CommOptions{.timeout = std::chrono::seconds(60)});
      const Topology topology = topology_of(hosts);
      HierarchicalCommunicator hier(host, topology, rank, std::move(links[index]),
                                    {.call_site = [rank] { return concat(" at r", rank, ".py:7"); },
                                     .heap = nullptr,
                                     .choose = choose,
                                     .board = board_of(posts, topology, rank)});
      hier.carry_messages(std::move(messages[index]));
      body(*host, hier, rank);
    } catch (const std::exception& error) {
      const std::scoped_lock lock(mutex);
      failures += concat("rank ", rank, ": ", error.what(), "\n");
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  require(failures.empty(), failures);
}

const std::vector<Hosts> kPlaces{
    {{0, 1}, {2, 3}}, {{0, 2}, {1, 3}},       {{0}, {1}, {2}, {3}}, {{0, 1, 2}, {3}},
    {{0}, {1, 2}},    {{0, 3, 4}, {1, 2, 5}}, {{0, 1, 2}, {3, 4}},  {{0, 4}, {1}, {2, 3, 5}},
};

}  // namespace dreamcomm::testing

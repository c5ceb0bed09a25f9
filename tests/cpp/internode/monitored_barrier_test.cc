// Monitored barriers of multi-node groups: which ranks are named, and that the next barrier passes.
#include <doctest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cpp/support/calls.h"
#include "cpp/support/expected_errors.h"
#include "cpp/support/hosts.h"

namespace dreamcomm::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// A rank with its count of collectives.
struct Rank {
  Communicator& host;
  HierarchicalCommunicator& hier;
  int number;
  std::int64_t issued = 0;

  void collective() {
    ++issued;
    Request request;
    request.deadline = Clock::now() + seconds(60);
    host.run_in_turn([&] { hier.run_ordered(request); });
  }
  void hold(milliseconds timeout, bool all) { hier.monitored_barrier(timeout, all, {}, issued); }
};

void on_hosts(const Hosts& hosts, const std::function<void(Rank&)>& body) {
  CHECK_NOTHROW(
      run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int number) {
        Rank rank{host, hier, number};
        body(rank);
      }));
}

const std::vector<Hosts> kSome{{{0, 1}, {2, 3}}, {{0}, {1}, {2}, {3}}, {{0, 3}, {1, 2}}};

TEST_CASE("a monitored barrier between hosts waits for all ranks") {
  for (const Hosts& hosts : kSome) {
    Gauge come;
    std::mutex mutex;
    on_hosts(hosts, [&](Rank& rank) {
      for (int round = 0; round < 30; ++round) {
        if (round % 4 == rank.number) std::this_thread::sleep_for(milliseconds(round % 3));
        {
          const std::scoped_lock lock(mutex);
          come.set(come.read() + 1);
        }
        rank.hold(seconds(60), round % 2 == 0);
        require(come.read() >= 4 * (round + 1), "it passed before all had entered");
      }
    });
  }
}

TEST_CASE("a monitored barrier between hosts names the missing and leaves the group usable") {
  for (const Hosts& hosts : kSome) {
    for (const std::vector<int>& absent :
         std::vector<std::vector<int>>{{1}, {3}, {2}, {1, 3}, {1, 2, 3}}) {
      for (const bool all : {false, true}) {
        CAPTURE(absent.size());
        on_hosts(hosts, [&](Rank& rank) {
          rank.collective();
          const bool comes = std::find(absent.begin(), absent.end(), rank.number) == absent.end();
          if (comes) {
            const auto timeout = rank.number == 0 ? milliseconds(300) : milliseconds(1500);
            const auto error = caught([&] { rank.hold(timeout, all); });
            expect(error, ErrorKind::kTimeout, {"onitored"});
            if (rank.number == 0) {
              const std::string first = "Rank " + std::to_string(absent[0]);
              if (!all || absent.size() == 1) {
                expect(error, ErrorKind::kTimeout, {first + " failed to pass", " 300 ms"});
              } else {
                expect(error, ErrorKind::kTimeout, {"Ranks " + std::to_string(absent[0])});
              }
            }
          }
          rank.collective();
          rank.hold(seconds(60), true);
        });
      }
    }
  }
}

TEST_CASE("ranks that have left monitored barriers between hosts out take part in the next") {
  for (const Hosts& hosts : kSome) {
    on_hosts(hosts, [](Rank& rank) {
      for (int round = 0; round < 8; ++round) {
        rank.collective();
        const bool absent = rank.number == round % 4 || rank.number == (round + 1) % 4;
        if (!absent) caught([&] { rank.hold(milliseconds(20), true); });
      }
      rank.collective();
      rank.hold(seconds(60), true);
    });
  }
}

TEST_CASE("a host that enters a monitored barrier late gets an error, and is in the next") {
  const Hosts hosts{{0, 1}, {2, 3}};
  Flag over;
  on_hosts(hosts, [&](Rank& rank) {
    rank.collective();
    const bool late = rank.number >= 2;
    const Clock::time_point end = Clock::now() + seconds(60);
    while (late && over.read() < 2 && Clock::now() < end) std::this_thread::yield();
    const auto error = caught([&] { rank.hold(milliseconds(1500), true); });
    if (!late) over.take();
    if (late) {
      expect(error, ErrorKind::kTimeout, {});
      const std::string begin =
          "monitored_barrier on host h1 (ranks 2, 3) came too late: rank 0 has ended it without "
          "this host: Rank 2 failed to pass";
      require(error.text.starts_with(begin), error.text);
    }
    if (!late) expect(error, ErrorKind::kTimeout, {"Rank 2 failed", "nothing has arrived from"});
    rank.hold(seconds(60), true);
  });
}

TEST_CASE("the first timeout on any host ends a monitored barrier for all") {
  const Hosts hosts{{0, 1}, {2, 3}};
  for (const int hasty : {1, 2, 3}) {
    on_hosts(hosts, [&](Rank& rank) {
      rank.collective();
      const Clock::time_point begin = Clock::now();
      const int absent = hasty == 1 ? 3 : 1;
      if (rank.number != absent) {
        const auto timeout = rank.number == hasty ? milliseconds(100) : milliseconds(60'000);
        const auto error = caught([&] { rank.hold(timeout, false); });
        expect(error, ErrorKind::kTimeout, {"onitored"});
        require(Clock::now() - begin < seconds(8), "it was not ended");
      }
      rank.collective();
      rank.hold(seconds(60), true);
    });
  }
}

TEST_CASE("a monitored barrier between hosts does not wait for a lost rank") {
  const Hosts hosts{{0, 1}, {2, 3}};
  for (const int gone : {1, 3}) {
    on_hosts(hosts, [&](Rank& rank) {
      rank.hold(seconds(60), true);
      if (rank.number == gone) return rank.host.abort("enough");
      const Clock::time_point begin = Clock::now();
      const auto error = caught([&] { rank.hold(seconds(60), false); });
      expect(error, ErrorKind::kPeerLost,
             {"Rank " + std::to_string(gone) + " failed to pass", "aborted the group: enough"});
      require(Clock::now() - begin < seconds(8), "it waited");
    });
  }
}

TEST_CASE("a monitored barrier between hosts does not wait for a lost leader") {
  for (const Hosts& hosts : {Hosts{{0, 1}, {2, 3}}, Hosts{{0}, {1}, {2}}}) {
    const int other = hosts[1][0];
    for (const int gone : {0, other}) {
      for (const bool waits : {false, true}) {  // for its end, or enters later
        Flag over;
        on_hosts(hosts, [&](Rank& rank) {
          rank.hold(seconds(60), true);
          if (rank.number == gone) {
            if (waits) std::this_thread::sleep_for(milliseconds(150));
            rank.hier.abort("enough");
            over.take();
            return;
          }
          const Clock::time_point end = Clock::now() + seconds(60);
          while (!waits && over.read() == 0 && Clock::now() < end) std::this_thread::yield();
          const Clock::time_point begin = Clock::now();
          const auto error = caught([&] { rank.hold(seconds(60), false); });
          expect(error, ErrorKind::kPeerLost, {"rank " + std::to_string(gone)});
          const bool beside = hosts[0].size() > 1 && rank.number / 2 == gone / 2;
          if (!beside) {
            expect(error, ErrorKind::kPeerLost,
                   {concat("rank ", gone, " of host h", gone == 0 ? 0 : 1), "has closed its link"});
          }
          if (!beside && gone != 0) {
            expect(error, ErrorKind::kPeerLost, {concat("Rank ", gone, " failed to pass")});
          }
          require(Clock::now() - begin < seconds(8), "it waited");
        });
      }
    }
  }
}

TEST_CASE("a rank that is lost while others wait for another host ends a monitored barrier") {
  const Hosts hosts{{0, 1}, {2, 3}};
  for (const int gone : {1, 3}) {
    Flag told;
    on_hosts(hosts, [&](Rank& rank) {
      rank.hold(seconds(60), true);
      const int absent = gone == 1 ? 2 : 0;
      const Clock::time_point begin = Clock::now();
      if (rank.number == absent) {
        while (told.read() == 0 && Clock::now() < begin + seconds(60)) std::this_thread::yield();
        return;
      }
      if (rank.number == gone) {
        std::thread end([&] {
          std::this_thread::sleep_for(milliseconds(150));
          rank.host.abort("enough");
        });
        caught([&] { rank.hold(seconds(60), false); });
        end.join();
        return;
      }
      const auto error = caught([&] { rank.hold(seconds(3), false); });
      const bool beside = rank.number / 2 == gone / 2;
      if (beside) {
        expect(error, ErrorKind::kPeerLost, {concat("rank ", gone, " has aborted the group")});
        require(Clock::now() - begin < seconds(2), "it waited");
        told.take();
      }
    });
  }
}

}  // namespace
}  // namespace dreamcomm::testing

// Monitored barriers that fail: which ranks are named, and that the next barrier passes.
#include <doctest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <future>
#include <memory>
#include <thread>

#include "core/flag.h"
#include "cpp/support/calls.h"
#include "cpp/support/expected_errors.h"
#include "cpp/support/ranks.h"
#include "cpp/support/shared_between_processes.h"

namespace dreamcomm::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST_CASE("a monitored barrier names the missing and leaves the group usable") {
  on_each_transport(4, [](Communicator& comm) {
    for (int round = 0; round < 5; ++round) comm.monitored_barrier(seconds(30), false);
    const bool absent = comm.rank() == 1 || comm.rank() == 3;
    if (!absent) {
      const auto timeout = comm.rank() == 0 ? milliseconds(400) : milliseconds(60'000);
      const auto error = caught([&] { comm.monitored_barrier(timeout, true); });
      expect(error, ErrorKind::kTimeout, {"Ranks 1, 3 failed to pass", "400 ms"});
    }
    run_case(comm, kSum);
    comm.monitored_barrier(seconds(30), true);
  });
}

TEST_CASE("a monitored barrier does not wait for a lost rank") {
  for (const bool all : {false, true}) {
    on_each_transport(4, [all](Communicator& comm) {
      run_case(comm, kSum);
      if (comm.rank() == 3) return comm.abort("enough");
      if (comm.rank() == 2) {
        wait_for_end_of(comm, 3);
        return comm.shutdown();
      }
      const auto error = caught([&] { comm.monitored_barrier(seconds(60), all); });
      const bool both = all && comm.rank() == 0;
      expect(error, ErrorKind::kPeerLost, {"failed to pass monitoredBarrier", "aborted the group"});
      if (both) expect(error, ErrorKind::kPeerLost, {"Ranks 2, 3", "rank 2 has left the group"});
    });
  }
}

TEST_CASE("every rank that waits in a monitored barrier learns why rank 0 ended it") {
  on_each_transport(3, [](Communicator& comm) {
    if (comm.rank() == 2) {  // does not enter
      expect(caught([&] { run_case(comm, kSum); }), ErrorKind::kPeerLost, {"enough"});
      return;
    }
    std::future<void> end;
    if (comm.rank() == 0) {
      end = std::async(std::launch::async, [&comm] {
        std::this_thread::sleep_for(milliseconds(20));
        comm.abort("enough");
      });
    }
    const auto error = caught([&] { comm.monitored_barrier(seconds(60), false); });
    const ErrorKind kind = comm.rank() == 0 ? ErrorKind::kAborted : ErrorKind::kPeerLost;
    expect(error, kind, {"monitored_barrier", "enough"});
  });
}

TEST_CASE("a rank 0 that enters a monitored barrier too late gets an error") {
  const auto aborted = shared_between_processes<std::array<Flag, 2>>();  // of each transport
  const auto used = shared_between_processes<Flag>();
  on_each_transport(3, [&](Communicator& comm) {
    Flag& count = (*aborted)[used->read()];
    comm.monitored_barrier(seconds(60), true);
    if (comm.rank() != 0) {
      const auto error = caught([&] { comm.monitored_barrier(milliseconds(300), true); });
      expect(error, ErrorKind::kTimeout, {"waiting for rank 0 to enter it"});
      count.take();
    } else {
      const Clock::time_point end = Clock::now() + seconds(60);
      while (count.read() < 2 && Clock::now() < end) std::this_thread::yield();
      used->publish(1);
      const auto error = caught([&] { comm.monitored_barrier(seconds(60), true); });
      expect(error, ErrorKind::kTimeout,
             {"monitored_barrier on rank 0 of 3 in group 'default' came too late",
              "rank 1 has stopped waiting", "rank 2 has stopped waiting"});
    }
    run_case(comm, kSum);
    comm.monitored_barrier(seconds(60), true);
  });
}

TEST_CASE("a late rank does not make a failed monitored barrier pass") {
  for (const bool left_one_out : {false, true}) {
    const auto failed = shared_between_processes<std::array<Flag, 2>>();  // of each transport
    const auto used = shared_between_processes<Flag>();
    on_each_transport(3, [&](Communicator& comm) {
      run_case(comm, kSum);
      Flag& rounds = (*failed)[used->read()];
      comm.monitored_barrier(seconds(60), true);
      const auto miss = [&] {
        const auto error = caught([&] { comm.monitored_barrier(milliseconds(400), false); });
        const bool late = comm.rank() == 1;
        expect(error, ErrorKind::kTimeout, {late ? "came too late" : "Rank 1 failed to pass"});
      };
      if (left_one_out) {
        if (comm.rank() != 1) miss();
        run_case(comm, kSum);
      }
      const Clock::time_point end = Clock::now() + seconds(60);
      if (comm.rank() == 1) {
        while (rounds.read() < 4 && Clock::now() < end) std::this_thread::yield();
        used->publish(1);
      }
      for (int round = 0; round < 2; ++round) {
        miss();
        if (comm.rank() != 1) rounds.take();
      }
      comm.monitored_barrier(seconds(60), true);
    });
  }
}

TEST_CASE("the first timeout of the ranks in a monitored barrier ends it for all") {
  on_each_transport(3, [](Communicator& comm) {
    run_case(comm, kSum);
    comm.monitored_barrier(seconds(60), true);
    const Clock::time_point begin = Clock::now();
    if (comm.rank() != 2) {
      const auto timeout = comm.rank() == 1 ? milliseconds(30) : milliseconds(60'000);
      const auto error = caught([&] { comm.monitored_barrier(timeout, true); });
      const bool decides = comm.rank() == 0;  // maybe after rank 1 has stopped waiting
      expect(error, ErrorKind::kTimeout, {decides ? "failed to pass" : "onitored"});
      require(Clock::now() - begin < seconds(8), "rank 1's timeout did not end it");
    }
    run_case(comm, kSum);
    comm.monitored_barrier(seconds(60), true);
  });
}

TEST_CASE("if rank 0 dies in a monitored barrier, the ranks in it learn of it at once") {
  const Setup setup{.transport = Transport::kShm, .size = 3, .page_bytes = tiny_page(3)};
  const auto body = [](Communicator& comm) {
    run_case(comm, kSum);
    if (comm.rank() == 2) {  // neither enters nor ends
      expect(wait_for_end_of(comm, 1), ErrorKind::kPeerLost, {});
      return;
    }
    std::thread end;
    if (comm.rank() == 0) {
      end = std::thread([] {
        std::this_thread::sleep_for(milliseconds(50));
        _exit(9);
      });
    }
    const Clock::time_point begin = Clock::now();
    const auto error = caught([&] { comm.monitored_barrier(seconds(60), false); });
    expect(error, ErrorKind::kPeerLost, {"the process of rank 0 has ended"});
    require(Clock::now() - begin < seconds(8), "no rank reported it");
  };
  CHECK_NOTHROW(run_ranks(setup, body, {0}));
}

TEST_CASE("ranks that have left monitored barriers out take part in the next") {
  on_each_transport(4, [](Communicator& comm) {
    for (int round = 0; round < 8; ++round) {
      run_case(comm, kSum);
      const bool absent = comm.rank() == round % 4 || comm.rank() == (round + 1) % 4;
      if (!absent) caught([&] { comm.monitored_barrier(milliseconds(20), true); });
    }
    run_case(comm, kSum);
    comm.monitored_barrier(seconds(60), true);
  });
}

TEST_CASE("a death before the first call is reported as rank 0 finds it") {
  on_each_transport(4, [](Communicator& comm) {
    comm.monitored_barrier(seconds(60), true);
    if (comm.rank() == 2) return comm.abort("enough");
    const auto error = caught([&] { comm.monitored_barrier(seconds(60), false); });
    expect(error, ErrorKind::kPeerLost, {"Rank 2 failed to pass"});
  });
}

TEST_CASE("all ranks run many monitored barriers, some late") {
  on_each_transport(3, [](Communicator& comm) {
    for (int round = 0; round < 200; ++round) {
      if (round % 3 == comm.rank()) std::this_thread::sleep_for(milliseconds(round % 2));
      comm.monitored_barrier(seconds(60), round % 2 == 0);
    }
  });
}

/// Stops this process after a while; other processes resume it.
std::thread stopping(Flag& resumed) {
  return std::thread([&resumed] {
    std::this_thread::sleep_for(milliseconds(50));
    raise(SIGSTOP);  // to this thread, so it is stopped before it continues
    resumed.publish(1);
  });
}

void resume_until(const Gauge& process, const Flag& resumed) {
  const Clock::time_point end = Clock::now() + seconds(60);
  while (resumed.read() == 0 && Clock::now() < end) {
    kill(static_cast<pid_t>(process.read()), SIGCONT);
    std::this_thread::sleep_for(milliseconds(10));
  }
}

TEST_CASE("if rank 0 is stopped in a monitored barrier, the ranks in it learn of it at its end") {
  const Setup setup{.transport = Transport::kShm, .size = 3, .page_bytes = tiny_page(3)};
  const auto caller = shared_between_processes<Gauge>();
  const auto resumed = shared_between_processes<Flag>();
  const auto body = [&](Communicator& comm) {
    run_case(comm, kSum);
    if (comm.rank() == 0) caller->set(getpid());
    comm.monitored_barrier(seconds(60), false);
    std::thread stop;
    if (comm.rank() == 0) stop = stopping(*resumed);
    const Clock::time_point begin = Clock::now();
    if (comm.rank() != 2) {
      const auto error = caught([&] { comm.monitored_barrier(milliseconds(400), false); });
      const bool in_time = Clock::now() - begin < seconds(8);
      if (comm.rank() == 1) resume_until(*caller, *resumed);
      if (comm.rank() == 0) expect(error, ErrorKind::kTimeout, {"failed to pass"});
      if (comm.rank() == 1)
        expect(error, ErrorKind::kTimeout, {"waiting for rank 0", "is stopped"});
      require(comm.rank() == 0 || in_time, "rank 1 waited on");
    }
    if (stop.joinable()) stop.join();
    const Clock::time_point end = Clock::now() + seconds(60);
    while (resumed->read() == 0 && Clock::now() < end) std::this_thread::yield();
    run_case(comm, kSum);
    comm.monitored_barrier(seconds(60), false);
  };
  CHECK_NOTHROW(run_ranks(setup, body));
}

TEST_CASE("stopping rank 0 for a moment, as a debugger does, changes nothing") {
  const Setup setup{.transport = Transport::kShm, .size = 3, .page_bytes = tiny_page(3)};
  const auto caller = shared_between_processes<Gauge>();
  const auto resumed = shared_between_processes<Flag>();
  const auto body = [&](Communicator& comm) {
    if (comm.rank() == 0) caller->set(getpid());
    comm.monitored_barrier(seconds(60), false);
    std::thread stop;
    if (comm.rank() == 0) stop = stopping(*resumed);
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(450));  // rank 0 is stopped at its deadline
      resume_until(*caller, *resumed);
    } else {
      const auto error = caught([&] { comm.monitored_barrier(milliseconds(400), false); });
      expect(error, ErrorKind::kTimeout, {"Rank 2 failed to pass"});
    }
    if (stop.joinable()) stop.join();
    run_case(comm, kSum);  // rank 2 is there until the others have looked
  };
  CHECK_NOTHROW(run_ranks(setup, body));
}

}  // namespace
}  // namespace dreamcomm::testing

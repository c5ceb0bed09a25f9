// Regions: memory that the processes of a host map.
#include "transport/shm/region.h"

#include <doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "cpp/support/expected_errors.h"

namespace dreamcomm::testing {
namespace {

SocketDeadline soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(30); }

/// Runs `body` in a forked child, and returns how that ends: 0, or 1 if it throws; else a signal.
int in_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);  // those of tests and sanitizers write a report
    try {
      body();
    } catch (const std::exception&) {
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

/// A sanitizer of threads does not follow a fork.
bool may_fork() { return transports().size() > 1; }

TEST_CASE("a region is the same memory for all that take it") {
  for (const bool protects : {false, true}) {
    for (const std::size_t bytes : {0, 1, 5000, 8192}) {
      CAPTURE(bytes);
      const RegionOffer offer(bytes, protects);
      std::vector<std::shared_ptr<Region>> taken(4);
      std::vector<std::thread> threads;
      for (auto& one : taken) {
        threads.emplace_back([&] { one = take_region(offer.address(), bytes, protects, soon()); });
      }
      for (std::thread& one : threads) one.join();
      for (std::size_t i = 0; i < taken.size(); ++i) {
        CHECK(taken[i]->bytes() == bytes);
        CHECK((taken[i]->data() != taken[i]->whole()) == protects);
        const auto value = static_cast<std::byte>(i + 1);
        std::memset(taken[i]->data(), static_cast<int>(value), bytes);
        if (bytes == 0) continue;
        CHECK(offer.region()->whole()[bytes - 1] == value);
        CHECK(taken[0]->whole()[0] == value);
      }
    }
  }
}

TEST_CASE("a forked child reads a region, and a stray write to a protected one faults") {
  if (!may_fork()) return;
  for (const bool protects : {false, true}) {
    const RegionOffer offer(64, protects);
    const std::shared_ptr<Region> region = offer.region();
    region->data()[7] = std::byte{3};
    const auto reads = [&] { require(region->whole()[7] == std::byte{3}, "another value"); };
    CHECK(in_child(reads) == 0);
    const auto writes = [&] { *static_cast<volatile std::byte*>(region->whole()) = std::byte{1}; };
    CHECK(in_child(writes) == (protects ? SIGSEGV : 0));
    region->allow_writes(true);
    CHECK(in_child(writes) == 0);
    region->allow_writes(false);
    CHECK(in_child(writes) == (protects ? SIGSEGV : 0));
    CHECK(region->data()[0] == std::byte{1});
    const auto steps = [&] { *static_cast<volatile std::byte*>(region->data()) = std::byte{2}; };
    region->allow_rows(false);
    CHECK(in_child(reads) == 0);
    CHECK(in_child(steps) == (protects ? SIGSEGV : 0));
    region->allow_rows(true);
    CHECK(in_child(steps) == 0);
  }
}

TEST_CASE("another process takes a region, and does not end an offer that it has inherited") {
  if (!may_fork()) return;
  RegionOffer offer(4097, /*protects=*/true);
  const auto take = [&] {
    offer.close();
    const auto region = take_region(offer.address(), 4097, /*protects=*/false, soon());
    region->data()[4096] = static_cast<std::byte>(std::to_integer<int>(region->data()[4096]) + 1);
  };
  CHECK(in_child(take) == 0);
  CHECK(in_child(take) == 0);
  CHECK(offer.region()->whole()[4096] == std::byte{2});
}

TEST_CASE("a region outlives its offer, which nothing can take any more") {
  std::shared_ptr<Region> region;
  std::string address;
  {
    RegionOffer offer(100, /*protects=*/false);
    address = offer.address();
    region = take_region(address, 100, /*protects=*/false, soon());
    offer.region()->data()[99] = std::byte{9};
    offer.close();
    offer.close();
  }
  CHECK(region->whole()[99] == std::byte{9});
  expect(caught([&] { take_region(address, 100, /*protects=*/false, soon()); }), ErrorKind::kSystem,
         {"no process of this host offers memory", address});
}

TEST_CASE("a region of another size, and what is no region, are refused") {
  const RegionOffer offer(4096, /*protects=*/false);
  expect(caught([&] { take_region(offer.address(), 4097, /*protects=*/false, soon()); }),
         ErrorKind::kSystem, {"other memory", "4097 bytes", "shard the same parameters"});
  const Fd silent = listen_at("dreamcomm-test-silent-" + std::to_string(getpid()), 1);
  const auto at = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  const std::string address = "dreamcomm-test-silent-" + std::to_string(getpid());
  expect(caught([&] { take_region(address, 1, /*protects=*/false, at); }), ErrorKind::kSystem,
         {"has sent none", "process " + std::to_string(getpid())});
  CHECK_THROWS_AS(RegionOffer(SIZE_MAX, /*protects=*/false), Error);
}

}  // namespace
}  // namespace dreamcomm::testing

// Regions: memory that the processes of a host map.
#include "transport/shm/region.h"

#include <doctest.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
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

/// A new folder where the tests run, which has to be empty in the end.
class TestFolder {
 public:
  TestFolder() { require(mkdtemp(path_.data()) != nullptr, "no folder"); }
  ~TestFolder() { rmdir(path_.c_str()); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  const std::string& path() const { return path_; }
  bool is_empty() const { return std::filesystem::is_empty(path_); }
  bool is_memory() const {
    struct statfs status{};
    return statfs(path_.c_str(), &status) == 0 && status.f_type == TMPFS_MAGIC;
  }

 private:
  std::string path_ = "dreamcomm-region-XXXXXX";
};

TEST_CASE("a region of a file keeps its values when its pages are dropped") {
  const TestFolder folder;
  if (folder.is_memory()) return;
  for (const bool protects : {false, true}) {
    constexpr std::size_t kBytes = 5 << 20;
    const auto counts = std::make_shared<RegionFolder>(folder.path());
    const RegionOffer offer(kBytes, protects, counts);
    CHECK(folder.is_empty());
    const auto taken = take_region(offer.address(), kBytes, protects, soon(), counts);
    CHECK(counts->bytes() == 2 * kBytes);
    for (std::size_t i = 0; i < kBytes; i += 4096) taken->data()[i] = std::byte{7};
    CHECK(counts->dropped() == 0);
    for (const auto& region : {taken, offer.region()}) {
      region->start_writing(1, kBytes - 1);
      region->drop(1, kBytes - 1);
      region->start_reading(4096, 1 << 20);
    }
    CHECK(counts->dropped() == 2 * kBytes);
    bool is_kept = true;
    for (std::size_t i = 0; i < kBytes; i += 4096)
      is_kept = is_kept && offer.region()->whole()[i] == std::byte{7};
    CHECK(is_kept);
    expect(caught([&] { taken->drop(kBytes, 1); }), ErrorKind::kInvalid, {"a part of the 5242880"});
  }
}

TEST_CASE("a file is not taken for memory, nor memory for a file") {
  const TestFolder folder;
  if (folder.is_memory()) return;
  const auto counts = std::make_shared<RegionFolder>(folder.path());
  const RegionOffer file(4096, /*protects=*/false, counts);
  const RegionOffer memory(4096, /*protects=*/false);
  expect(caught([&] { take_region(file.address(), 4096, false, soon()); }), ErrorKind::kSystem,
         {"other memory"});
  const auto own = make_own_region(100, counts);
  CHECK(own->folder() == counts);
  CHECK(memory.region()->folder() == nullptr);
  memory.region()->data()[0] = std::byte{5};
  memory.region()->drop(0, 4096);
  CHECK(memory.region()->data()[0] == std::byte{5});
}

TEST_CASE("folders that cannot hold a region are refused") {
  const TestFolder folder;
  const auto make = [](const std::string& path, std::size_t bytes) {
    return caught([&] { make_own_region(bytes, std::make_shared<RegionFolder>(path)); });
  };
  expect(make("dreamcomm-no-such-folder", 1), ErrorKind::kSystem, {"'dreamcomm-no-such-folder'"});
  expect(make("/dev/shm", 1), ErrorKind::kSystem, {"is memory (tmpfs)"});
  if (folder.is_memory()) return;
  expect(make(folder.path(), std::size_t{1} << 43), ErrorKind::kSystem,
         {"cannot reserve 8796093022208 bytes", folder.path(), "bytes free"});
  CHECK(folder.is_empty());
}

}  // namespace
}  // namespace dreamcomm::testing

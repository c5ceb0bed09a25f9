// How the ranks of a group find each other's windows.
#include <algorithm>
#include <vector>

#include "core/text.h"
#include "gpu/host/communicator.h"

namespace dreamcomm::gpu {
namespace {

/// How a step went on one rank.
struct Verdict {
  bool fails = false;
  char why[400] = {};
};

struct Hello {
  Verdict verdict;
  CommunicatorOptions options;
  Id device{};
  std::int32_t room = 0;
};

struct Named {
  Verdict verdict;
  MemoryName window;
  MemoryName heap;
};

template <typename Step>
Verdict try_to(const Step& step) {
  Verdict verdict;
  try {
    step();
  } catch (const std::exception& error) {
    verdict.fails = true;
    put_text(verdict.why, error.what());
  }
  return verdict;
}

template <typename T>
std::vector<T> all_of(const T& mine, int size, const Exchange& exchange) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<std::size_t>(size));
  exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

const Verdict& verdict_of(const Verdict& verdict) { return verdict; }
const Verdict& verdict_of(const Hello& hello) { return hello.verdict; }
const Verdict& verdict_of(const Named& named) { return named.verdict; }

/// The first failure, or nothing; the same on all ranks.
template <typename T>
std::string failure_among(const std::vector<T>& all) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    const Verdict& verdict = verdict_of(all[r]);
    if (verdict.fails) return concat("rank ", r, ": ", verdict.why);
  }
  return "";
}

/// Layouts of windows have to be equal, or ranks would write at wrong places.
std::string difference_among(const std::vector<Hello>& hellos) {
  const auto words = [](const CommunicatorOptions& o) {
    return concat("page_bytes ", o.page_bytes, ", most_blocks ", o.most_blocks, ", lanes ", o.lanes,
                  ", heap_bytes ", o.heap_bytes, ", turn ", o.costs.turn, " s, byte ",
                  o.costs.per_byte, " s, algorithm ", o.asked ? name(*o.asked) : "auto");
  };
  for (std::size_t r = 1; r < hellos.size(); ++r) {
    if (hellos[r].options == hellos[0].options) continue;
    return concat("rank ", r, " has the options ", words(hellos[r].options), ", rank 0 ",
                  words(hellos[0].options));
  }
  return "";
}

void require_valid(const CommunicatorOptions& options) {
  // Pieces for every peer, and the sizes of all_to_all.
  check(options.page_bytes >= 512 && options.page_bytes % kSector == 0, ErrorKind::kInvalid,
        "expected pages of a multiple of ", kSector, " bytes, at least 512, got ",
        options.page_bytes);
  check(options.most_blocks >= 1 && options.lanes >= 1, ErrorKind::kInvalid,
        "expected at least one block and one lane, got ", options.most_blocks, " and ",
        options.lanes);
}

int ranks_on(const std::vector<Hello>& hellos, const Id& device) {
  return static_cast<int>(std::count_if(
      hellos.begin(), hellos.end(), [&](const Hello& hello) { return hello.device == device; }));
}

/// Blocks that every rank's kernels may have, though all that share a device run at once.
int common_blocks(const std::vector<Hello>& hellos, int most) {
  int blocks = most;
  for (const Hello& hello : hellos) {
    blocks = std::min(blocks, hello.room / ranks_on(hellos, hello.device));
  }
  return blocks;
}

}  // namespace

BootstrapResult bootstrap(int rank, int size,
                          const std::function<std::unique_ptr<Driver>()>& make_driver,
                          const CommunicatorOptions& options, const Exchange& exchange,
                          std::chrono::milliseconds patience) {
  std::unique_ptr<Driver> driver;
  Hello hello;
  hello.verdict = try_to([&] {
    check(size <= kMaxRanks, ErrorKind::kInvalid, "a group for GPUs of one host has at most ",
          kMaxRanks, " ranks, got ", size);
    require_valid(options);
    hello.options = options;
    driver = make_driver();
    hello.device = driver->device();
    hello.room = driver->room();
  });
  const std::vector<Hello> hellos = all_of(hello, size, exchange);
  if (std::string why = failure_among(hellos); !why.empty()) return {nullptr, std::move(why)};
  if (std::string why = difference_among(hellos); !why.empty()) return {nullptr, std::move(why)};
  const int blocks = common_blocks(hellos, std::min(options.most_blocks, kMaxBlocks));
  if (blocks < 1) return {nullptr, "more ranks share a device than it runs blocks at a time"};

  const int sharing = ranks_on(hellos, hello.device);
  BootstrapResult bootstrapped;
  bootstrapped.group.reset(
      new Communicator(rank, size, std::move(driver), options, blocks, sharing));
  Communicator& group = *bootstrapped.group;
  Named named;
  named.verdict = try_to([&] {
    group.allocate();
    named.window = group.driver_->name_of(group.windows_[static_cast<std::size_t>(rank)]);
    if (group.heap_) named.heap = group.driver_->name_of(group.heap_.get());
  });
  const std::vector<Named> all_named = all_of(named, size, exchange);
  bootstrapped.why_not = failure_among(all_named);
  if (bootstrapped.why_not.empty()) {
    std::vector<MemoryName> windows;
    std::vector<MemoryName> heaps;
    for (const Named& one : all_named) {
      windows.push_back(one.window);
      heaps.push_back(one.heap);
    }
    const Verdict opened = try_to([&] {
      group.open(windows, heaps);
      group.stamp_all();
    });
    bootstrapped.why_not = failure_among(all_of(opened, size, exchange));
  }
  if (bootstrapped.why_not.empty()) {
    const Verdict seen = try_to([&] { group.look_for_stamps(); });
    bootstrapped.why_not = failure_among(all_of(seen, size, exchange));
  }
  if (bootstrapped.why_not.empty()) {
    const Verdict called = try_to([&] { group.probe(patience); });
    bootstrapped.why_not = failure_among(all_of(called, size, exchange));
  }
  if (!bootstrapped.why_not.empty()) {
    group.close(exchange);
    bootstrapped.group.reset();
  }
  return bootstrapped;
}

}  // namespace dreamcomm::gpu

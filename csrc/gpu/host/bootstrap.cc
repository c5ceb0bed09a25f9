// Bootstrap of a group: the ranks exchange the names of their windows and map each other's.
#include <algorithm>
#include <vector>

#include "core/text.h"
#include "gpu/host/communicator.h"

namespace dreamcomm::gpu {
namespace {

/// The result of a step on one rank.
struct StepResult {
  bool fails = false;
  char why[400] = {};
};

struct RankInfo {
  StepResult result;
  CommunicatorOptions options;
  Id device{};
  std::int32_t resident_blocks = 0;
};

struct MemoryNames {
  StepResult result;
  MemoryName window;
  MemoryName heap;
};

template <typename Step>
StepResult try_to(const Step& step) {
  StepResult result;
  try {
    step();
  } catch (const std::exception& error) {
    result.fails = true;
    put_text(result.why, error.what());
  }
  return result;
}

template <typename T>
std::vector<T> all_of(const T& mine, int size, const Exchange& exchange) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<std::size_t>(size));
  exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

// NOLINTNEXTLINE(bugprone-return-const-ref-from-parameter): all are elements of a vector
const StepResult& result_of(const StepResult& result) { return result; }
const StepResult& result_of(const RankInfo& info) { return info.result; }
const StepResult& result_of(const MemoryNames& named) { return named.result; }

/// The first failure, or nothing; the same on all ranks.
template <typename T>
std::string failure_among(const std::vector<T>& all) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    const StepResult& result = result_of(all[r]);
    if (result.fails) return concat("rank ", r, ": ", result.why);
  }
  return "";
}

/// Names the first rank whose options differ from rank 0's, or returns nothing. Ranks whose windows
/// had different layouts would write at wrong places.
std::string difference_among(const std::vector<RankInfo>& infos) {
  const auto words = [](const CommunicatorOptions& o) {
    return concat("page_bytes ", o.page_bytes, ", most_blocks ", o.most_blocks, ", lanes ", o.lanes,
                  ", heap_bytes ", o.heap_bytes, ", turn ", o.costs.turn, " s, byte ",
                  o.costs.per_byte, " s, algorithm ", o.asked ? name(*o.asked) : "auto");
  };
  for (std::size_t r = 1; r < infos.size(); ++r) {
    if (infos[r].options == infos[0].options) continue;
    return concat("rank ", r, " has the options ", words(infos[r].options), ", rank 0 ",
                  words(infos[0].options));
  }
  return "";
}

void require_valid(const CommunicatorOptions& options) {
  // A page has to hold a piece for every peer, and the sizes of all_to_all.
  check(options.page_bytes >= 512 && options.page_bytes % kSector == 0, ErrorKind::kInvalid,
        "expected pages of a multiple of ", kSector, " bytes, at least 512, got ",
        options.page_bytes);
  check(options.most_blocks >= 1 && options.lanes >= 1, ErrorKind::kInvalid,
        "expected at least one block and one lane, got ", options.most_blocks, " and ",
        options.lanes);
}

int ranks_on(const std::vector<RankInfo>& infos, const Id& device) {
  return static_cast<int>(std::count_if(
      infos.begin(), infos.end(), [&](const RankInfo& info) { return info.device == device; }));
}

/// Blocks that every rank's kernels may have, so that those of all ranks that share a device run at
/// the same time.
int common_blocks(const std::vector<RankInfo>& infos, int most) {
  int blocks = most;
  for (const RankInfo& info : infos) {
    blocks = std::min(blocks, info.resident_blocks / ranks_on(infos, info.device));
  }
  return blocks;
}

}  // namespace

BootstrapResult bootstrap(int rank, int size,
                          const std::function<std::unique_ptr<Driver>()>& make_driver,
                          const CommunicatorOptions& options, const Exchange& exchange,
                          std::chrono::milliseconds patience) {
  std::unique_ptr<Driver> driver;
  RankInfo info;
  info.result = try_to([&] {
    check(size <= kMaxRanks, ErrorKind::kInvalid, "a group for GPUs of one host has at most ",
          kMaxRanks, " ranks, got ", size);
    require_valid(options);
    info.options = options;
    driver = make_driver();
    info.device = driver->device();
    info.resident_blocks = driver->resident_blocks();
  });
  const std::vector<RankInfo> infos = all_of(info, size, exchange);
  if (std::string why = failure_among(infos); !why.empty()) return {nullptr, std::move(why)};
  if (std::string why = difference_among(infos); !why.empty()) return {nullptr, std::move(why)};
  const int blocks = common_blocks(infos, std::min(options.most_blocks, kMaxBlocks));
  if (blocks < 1)
    return {nullptr, "more ranks share a device than it runs blocks at the same time"};

  const int sharing = ranks_on(infos, info.device);
  BootstrapResult bootstrapped;
  bootstrapped.group.reset(
      new Communicator(rank, size, std::move(driver), options, blocks, sharing));
  Communicator& group = *bootstrapped.group;
  MemoryNames named;
  named.result = try_to([&] {
    group.allocate();
    named.window = group.driver_->name_of(group.windows_[static_cast<std::size_t>(rank)]);
    if (group.heap_) named.heap = group.driver_->name_of(group.heap_.get());
  });
  const std::vector<MemoryNames> all_named = all_of(named, size, exchange);
  bootstrapped.why_not = failure_among(all_named);
  if (bootstrapped.why_not.empty()) {
    std::vector<MemoryName> windows;
    std::vector<MemoryName> heaps;
    for (const MemoryNames& one : all_named) {
      windows.push_back(one.window);
      heaps.push_back(one.heap);
    }
    const StepResult opened = try_to([&] {
      group.open(windows, heaps);
      group.stamp_all();
    });
    bootstrapped.why_not = failure_among(all_of(opened, size, exchange));
  }
  if (bootstrapped.why_not.empty()) {
    const StepResult seen = try_to([&] { group.check_stamps(); });
    bootstrapped.why_not = failure_among(all_of(seen, size, exchange));
  }
  if (bootstrapped.why_not.empty()) {
    const StepResult called = try_to([&] { group.probe(patience); });
    bootstrapped.why_not = failure_among(all_of(called, size, exchange));
  }
  if (!bootstrapped.why_not.empty()) {
    group.close(exchange);
    bootstrapped.group.reset();
  }
  return bootstrapped;
}

}  // namespace dreamcomm::gpu

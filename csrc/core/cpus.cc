#include "core/cpus.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

namespace dreamcomm {
namespace {

constexpr const char* kRoot = "/sys/fs/cgroup";

/// The processors this thread may use: as many as Linux knows, unlike a cpu_set_t.
class CpuMask {
 public:
  CpuMask() {
    if (sched_getaffinity(0, sizeof words_, set()) != 0) words_ = {};
  }
  int count() const {
    int sum = 0;
    for (const unsigned long word : words_) sum += std::popcount(word);
    return sum;
  }
  void flip(int cpu) {
    const auto number = static_cast<std::size_t>(cpu);
    if (number / kBits < words_.size()) words_[number / kBits] ^= 1UL << number % kBits;
  }
  bool operator==(const CpuMask&) const = default;
  bool apply() { return sched_setaffinity(0, sizeof words_, set()) == 0; }

 private:
  static constexpr std::size_t kBits = 8 * sizeof(unsigned long);
  cpu_set_t* set() { return reinterpret_cast<cpu_set_t*>(words_.data()); }
  std::array<unsigned long, 8192 / kBits> words_{};
};

std::string first_line(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

/// Returns the limit that a folder of a control group sets, in the syntax of version 1 or 2.
std::optional<double> limit_of(const std::filesystem::path& folder) {
  if (const auto limit = cpu_limit(first_line(folder / "cpu.max"))) return limit;
  return cpu_limit(first_line(folder / "cpu.cfs_quota_us") + ' ' +
                   first_line(folder / "cpu.cfs_period_us"));
}

/// The least limit from the process's control group up to the root; inside of a
/// container the root is often the container's own group.
double least_limit() {
  double least = std::numeric_limits<double>::max();
  const auto consider = [&](const std::filesystem::path& folder) {
    if (const auto limit = limit_of(folder)) least = std::min(least, *limit);
  };
  std::ifstream groups("/proc/self/cgroup");  // lines of "number:controllers:/path"
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers.find("cpu") == std::string::npos) continue;
    const std::filesystem::path root = std::filesystem::path(kRoot) / controllers;
    std::filesystem::path path = line.substr(second + 1);
    for (; path.has_relative_path(); path = path.parent_path()) {
      consider(root / path.relative_path());
    }
    consider(root);
  }
  consider(std::filesystem::path(kRoot) / "cpu");  // another hierarchy's folder has another name
  return least;
}

}  // namespace

std::optional<double> cpu_limit(std::string_view text) {
  std::istringstream words{std::string(text)};
  double quota = 0;
  double period = 0;
  if (!(words >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

int current_cpu() { return sched_getcpu(); }

void leave_cpu() {
  CpuMask mask;
  const int here = current_cpu();
  if (mask.count() < 2 || here < 0) return;
  // The first call moves the thread at once. The second removes the restriction again, unless other
  // code has changed the affinity in the meantime.
  mask.flip(here);
  if (!mask.apply() || !(CpuMask() == mask)) return;
  mask.flip(here);
  mask.apply();
}

int usable_cpus() {
  const int cpus = std::max(1, CpuMask().count());
  const double limit = std::ceil(least_limit());
  return limit < cpus ? std::max(1, static_cast<int>(limit)) : cpus;
}

}  // namespace dreamcomm

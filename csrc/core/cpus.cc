#include "core/cpus.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

namespace dreamcomm {
namespace {

constexpr const char* kRoot = "/sys/fs/cgroup";

std::string first_line(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

/// The limit that a folder of a control group sets, in either version's words.
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
  cpu_set_t all;
  CPU_ZERO(&all);
  if (sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) < 2) return;
  cpu_set_t others = all;
  CPU_CLR(static_cast<unsigned>(std::max(0, current_cpu())), &others);
  // The first call moves the thread at once, the second lets it roam as before.
  if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof all, &all);
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cpus = 1;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
  const double limit = std::ceil(least_limit());
  if (limit < cpus) cpus = static_cast<int>(limit);
  return std::max(1, cpus);
}

}  // namespace dreamcomm

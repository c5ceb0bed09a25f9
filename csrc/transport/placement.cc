#include "transport/placement.h"

#include <algorithm>

#include "core/cpus.h"

namespace dreamcomm {
namespace {

constexpr std::chrono::milliseconds kShortest{1};
constexpr std::chrono::milliseconds kLongest{32};

}  // namespace

bool is_in_the_way(std::span<const int> cpus, int rank, int blocker, int share) {
  const auto cpu_of = [&](int r) { return cpus[static_cast<std::size_t>(r)]; };
  const int here = cpu_of(rank);
  if (share == 1) return cpu_of(blocker) == here;
  int last = -1;
  for (int r = 0; r < static_cast<int>(cpus.size()); ++r) {
    if (r != blocker && cpu_of(r) == here) last = r;
  }
  return last == rank && std::ranges::count(cpus, here) > share;
}

Placement::Placement(Fabric& fabric, int cpus)
    : fabric_(fabric),
      cpus_(static_cast<std::size_t>(fabric.size())),
      share_((fabric.size() + cpus - 1) / cpus),
      pause_(kShortest) {}

void Placement::look(int blocker) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  Gauge& mine = fabric_.header(fabric_.rank()).progress.cpu;
  mine.set(current_cpu());
  for (int rank = 0; rank < fabric_.size(); ++rank) {
    cpus_[static_cast<std::size_t>(rank)] =
        static_cast<int>(fabric_.header(rank).progress.cpu.read());
  }
  const bool leaves = is_in_the_way(cpus_, fabric_.rank(), blocker, share_);
  pause_ = leaves ? std::min(2 * pause_, kLongest) : kShortest;
  next_ = now + pause_;
  if (!leaves) return;
  leave_cpu();
  mine.set(current_cpu());
}

}  // namespace dreamcomm

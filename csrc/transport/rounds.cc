#include "transport/rounds.h"

#include <algorithm>

#include "core/cpus.h"

namespace dreamcomm {

Rounds::Rounds(Fabric& fabric)
    : fabric_(fabric),
      layout_(fabric.layout()),
      rank_(fabric.rank()),
      size_(fabric.size()),
      page_bytes_(fabric.layout().page_bytes()),
      patience_(Patience::of(fabric.size())),
      next_(fabric.header(fabric.rank()).round.read() + 1) {}

void Rounds::turn(Peers reads, Peers readers, Watch& watch) {
  fabric_.header(rank_).round.publish(next_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) fabric_.header(peer).doorbell.ring();
  }
  int blocker = -1;
  const auto ready = [&] {
    blocker = behind(reads);
    return blocker < 0;
  };
  if (!spin_until(std::min(patience_.spins, Patience::kGlance), ready)) {
    part_from(blocker);
    wait_until(fabric_.header(rank_).doorbell, patience_, watch, ready, [&] { return blocker; });
  }
  ++next_;
  readers_ = readers;
}

/// The kernel likes to wake a thread where its waker runs. Two ranks that wait for each
/// other so end up on one processor, each spinning in the other's way, with processors
/// to spare; that lasts, and costs a factor of 20 in small calls. Whoever notices goes,
/// but not all the time: where other programs use the processors, too, it may help no
/// one.
void Rounds::part_from(int rank) {
  constexpr std::chrono::milliseconds kStay{10};
  if (patience_.spins <= Patience::kGlance) return;  // more ranks than processors
  if (fabric_.header(rank).progress.cpu.read() != current_cpu()) return;
  const auto now = std::chrono::steady_clock::now();
  if (now - parted_ < kStay) return;
  parted_ = now;
  leave_cpu();
}

/// One of the ranks to wait for that has not published the coming round, or -1.
int Rounds::behind(Peers reads) const {
  for (int rank = 0; rank < size_; ++rank) {
    if ((reads.has(rank) || readers_.has(rank)) && !fabric_.header(rank).round.has(next_)) {
      return rank;
    }
  }
  return -1;
}

}  // namespace dreamcomm

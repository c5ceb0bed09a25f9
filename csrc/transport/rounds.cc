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
      patience_(Patience::of(fabric.size(), fabric.internode())),
      placement_(fabric, usable_cpus()),
      next_(fabric.header(fabric.rank()).round.read() + 1) {}

void Rounds::turn_to_be_settled(Peers reads, Peers readers, WaitObserver& observer) {
  fabric_.header(rank_).round.publish(next_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) fabric_.header(peer).doorbell.ring();
  }
  int blocker = -1;
  const auto ready = [&] {
    blocker = behind(reads);
    return blocker < 0;
  };
  if (!spin_until(std::min(patience_.spins(), Patience::kGlance), ready)) {
    placement_.look(blocker);
    wait_to_be_settled(fabric_.header(rank_).doorbell, patience_, observer, ready,
                       [&] { return blocker; });
  }
  ++next_;
  readers_ = readers;
}

/// Returns one of the ranks to wait for that has not published the coming round, or -1.
int Rounds::behind(Peers reads) const {
  for (int rank = 0; rank < size_; ++rank) {
    if ((reads.has(rank) || readers_.has(rank)) && !fabric_.header(rank).round.has(next_)) {
      return rank;
    }
  }
  return -1;
}

}  // namespace dreamcomm

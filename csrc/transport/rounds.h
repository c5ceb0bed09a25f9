// Rounds: the one protocol by which collectives exchange bytes.
//
// Each rank owns two pages, used in turn. In every round a rank
//
//     1. writes its own page of the round              page()
//     2. publishes the round and waits for its peers   turn()
//     3. reads its peers' pages of the round           from()
//
// and starts the next round, which uses the other page. turn() takes two sets: the ranks whose
// pages this rank reads in the round, and the ranks that read its own. It waits for the former, and
// for those that read its page in the round before.
//
// INVARIANT: no page is written while a peer reads it, nor read before it is
// written. Proof. Let rank a write its page in round r (step 1), and let b be a
// rank that reads that page of a.
//   Read after write: b reads it in step 3 of round r, after b's turn(r) saw a's
//   publication of r, which follows a's writes (release/acquire).
//   Write after read: the page was last used in round r-2, whose step 3 at b
//   ends before b publishes r-1. a writes it in round r, that is after a's
//   turn(r-1), which waited for r-1 of b, a reader of the round before.
//
// tests/models/rounds.pml checks this, and the waits, in every order of the ranks' steps.
//
// Between turn(r-1) and turn(r) a rank may therefore read the peers' pages of
// r-1 and write its own page of r at the same time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/peers.h"
#include "transport/fabric.h"
#include "transport/placement.h"
#include "transport/wait.h"

namespace dreamcomm {

class Rounds {
 public:
  explicit Rounds(Fabric& fabric);

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::size_t page_bytes() const { return page_bytes_; }
  std::span<std::byte> heap(int rank) const { return fabric_.heap(rank); }

  /// The waiting policy of turn().
  const Patience& patience() const { return patience_; }

  /// The number of the coming round, the same on all ranks.
  std::uint32_t coming() const { return next_; }
  /// This rank's page of the coming round.
  std::byte* page() const { return layout_.page(fabric_.window(rank_), next_); }
  /// Ends the writing of this rank's page and begins the reading of others':
  /// of those in `reads`; the ranks in `readers` are going to read this one.
  /// Every rank of the group turns the same rounds, with sets that agree.
  void turn(Peers reads, Peers readers, WaitObserver& observer) {
    turn_to_be_settled(reads, readers, observer);
    patience_.settle();
  }
  /// The same, for a call that peers may not have entered yet. settle() then reports since when the
  /// last one has.
  void turn_to_be_settled(Peers reads, Peers readers, WaitObserver& observer);
  void settle(std::int64_t ready_ns) { patience_.settle(ready_ns); }
  /// A rank's page of the last turn, until the next one.
  const std::byte* from(int rank) const { return layout_.page(fabric_.window(rank), next_ - 1); }

 private:
  int behind(Peers reads) const;

  Fabric& fabric_;
  const WindowLayout& layout_;
  int rank_;
  int size_;
  std::size_t page_bytes_;
  Patience patience_;
  Placement placement_;
  std::uint32_t next_;             // the coming round
  Peers readers_ = Peers::none();  // the ranks that read this rank's page of the last round
};

}  // namespace dreamcomm

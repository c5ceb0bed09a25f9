// Rounds between block b of all ranks: transport/rounds.h, on the GPU.
//
// The protocol and its proof are those of the CPU's rounds, with "the rank" read as
// "block b of the rank": two pages in turns, and a turn that waits for those whose page
// is read and for those that read the own page of the round before. Three things differ.
//
//   Lanes. All lanes of the block write the page. They meet before lane p publishes the
//   round to rank p, so that the publication follows all their writes; lane p, who sees
//   rank p's word, meets the others before any of them reads. Release and acquire are
//   cumulative: what one lane published another may have written.
//
//   Words. A rank writes its word into its peers' windows, so that each polls memory of
//   its own. Beside the round stands the digest of the call. The first turn of a call is
//   among all, so no one publishes r+2 before all have published r+1, which is after
//   they saw r: with a word for each parity of the round, the word of a first turn
//   stays until all have compared it. A peer that made another call is thus found by
//   every rank, before data moves.
//
//   Giving up. A wait ends after `patience_ns`, when the host says so, or when any rank
//   or another block of this one has given up. The first lane of the rank that notices
//   says why in the report; all lanes of the block leave the kernel together, and mark
//   it in all windows, so that the other blocks and the peers' kernels end as well.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/flag.h"
#include "core/peers.h"
#include "gpu/target.h"
#include "gpu/task.h"

namespace dreamcomm::gpu {

template <Target T>
class BlockRounds {
 public:
  /// All lanes of a block make one, and call everything together.
  DREAMCOMM_DEVICE BlockRounds(const T& target, const Task& task)
      : target_(target),
        task_(task),
        last_(static_cast<std::uint32_t>(task.rounds[target.block()])) {
    target_.meet();  // nobody stores the number before all have read it
  }

  DREAMCOMM_DEVICE int rank() const { return task_.rank; }
  DREAMCOMM_DEVICE int size() const { return task_.size; }
  DREAMCOMM_DEVICE std::size_t page_bytes() const { return task_.layout.page_bytes; }

  /// This rank's page of the coming round.
  DREAMCOMM_DEVICE std::byte* page() const { return page_of(task_.rank, last_ + 1); }
  /// A rank's page of the last turn.
  DREAMCOMM_DEVICE const std::byte* from(int rank) const { return page_of(rank, last_); }

  /// As Rounds::turn; false if the block has to give up, and then on all its lanes.
  DREAMCOMM_DEVICE_LOOP bool turn(Peers reads, Peers readers) {
    const std::uint32_t round = last_ + 1;
    target_.meet();
    bool lost = false;
    for (int peer = target_.lane(); peer < task_.size; peer += target_.lanes()) {
      if (peer == task_.rank) continue;
      target_.publish(&slot(peer, task_.rank).published[round & 1U], word(round));
    }
    for (int peer = target_.lane(); peer < task_.size && !lost; peer += target_.lanes()) {
      const bool awaited = turns_ == 0 || reads.has(peer) || readers_.has(peer);
      if (awaited && peer != task_.rank) lost = !await(peer, round);
    }
    if (target_.any(lost)) {
      tell_all();
      return false;
    }
    last_ = round;
    readers_ = readers;
    ++turns_;
    return true;
  }

  /// Ends the call on all ranks, who all found the same contradiction.
  DREAMCOMM_DEVICE void refuse_sizes(int giver, int taker, std::uint64_t given,
                                     std::uint64_t expected) const {
    if (target_.lane() == 0 && target_.claim(&task_.report->claimed, 1)) {
      task_.report->taker = taker;
      task_.report->given = given;
      task_.report->expected = expected;
      write_report(Report::kSizes, giver, last_);
    }
    tell_all();
  }

  /// After the last turn of the call: the next one goes on from here.
  DREAMCOMM_DEVICE void close() const {
    if (target_.lane() == 0) task_.rounds[target_.block()] = last_;
  }

 private:
  DREAMCOMM_DEVICE std::byte* page_of(int rank, std::uint32_t round) const {
    return task_.windows[rank] + task_.layout.page(target_.block(), round);
  }
  /// The words that `writer` writes into the window of `owner`.
  DREAMCOMM_DEVICE Slot& slot(int owner, int writer) const {
    return *reinterpret_cast<Slot*>(task_.windows[owner] + Layout::slot(target_.block(), writer));
  }
  DREAMCOMM_DEVICE Mark& mark(int owner, int writer) const {
    return *reinterpret_cast<Mark*>(task_.windows[owner] + Layout::mark(writer));
  }
  DREAMCOMM_DEVICE std::uint64_t word(std::uint32_t round) const {
    return std::uint64_t{round} << 32U | digest(task_.card);
  }

  DREAMCOMM_DEVICE bool await(int peer, std::uint32_t round) const {
    Slot& theirs = slot(task_.rank, peer);
    const std::uint64_t begin = target_.now();
    for (std::uint32_t looks = 1;; ++looks) {
      const std::uint64_t seen = target_.read(&theirs.published[round & 1U]);
      const auto theirs_is = static_cast<std::uint32_t>(seen >> 32U);
      if (theirs_is == round && seen != word(round)) return give_up(Report::kMismatch, peer, round);
      if (reached(theirs_is, round)) return true;
      target_.pause();
      if (looks % 64 != 0) continue;
      if (target_.read(&mark(task_.rank, task_.rank).gone) != 0) return false;
      const int gone = one_gone();
      if (gone >= 0) return give_up(Report::kPeerGone, gone, round);
      if (target_.read(&task_.control->abort) != 0) return give_up(Report::kAborted, peer, round);
      if (target_.now() - begin > task_.patience_ns) return give_up(Report::kTimeout, peer, round);
    }
  }

  /// A rank that has given up, also one that is not waited for: it may be why the awaited
  /// one does not come. Or -1.
  DREAMCOMM_DEVICE int one_gone() const {
    for (int r = 0; r < task_.size; ++r) {
      if (target_.read(&mark(task_.rank, r).gone) != 0) return r;
    }
    return -1;
  }

  /// The first lane of all blocks that gives up says why. Always false.
  DREAMCOMM_DEVICE bool give_up(Report::Reason reason, int missing, std::uint32_t round) const {
    if (target_.claim(&task_.report->claimed, 1)) write_report(reason, missing, round);
    return false;
  }

  DREAMCOMM_DEVICE void write_report(Report::Reason reason, int missing,
                                     std::uint32_t round) const {
    Report& report = *task_.report;
    report.rank = task_.rank;
    report.missing = missing;
    report.round = round;
    report.turn = turns_;
    report.block = target_.block();
    report.card = task_.card;
    target_.publish(&report.reason, static_cast<std::uint64_t>(reason));
  }

  DREAMCOMM_DEVICE void tell_all() const {
    for (int peer = target_.lane(); peer < task_.size; peer += target_.lanes()) {
      target_.publish(&mark(peer, task_.rank).gone, 1);
    }
  }

  const T& target_;
  const Task& task_;
  std::uint32_t last_;  // round published
  std::uint32_t turns_ = 0;
  Peers readers_ = Peers::none();  // who read this rank's page of the last round
};

}  // namespace dreamcomm::gpu

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
//   its own. Beside the round stands the digest of the call. The first turn of a call, in
//   round r, is among all: whoever publishes r+1 has compared all words of r, so the
//   calls of all were equal. A rank that still waits then finds words of r, or of r+2 in
//   the same place (a word for each parity), of equal calls. So a peer that made another
//   call is found by every rank that goes no further, before data moves.
//
//   LL packets (ll_packets.h) go beside a word that nothing in the call is ordered before.
//
//   Giving up. A wait ends after `patience_ns`, when the host says so, or when any rank
//   or another block of this one has given up. The first lane of the rank that notices
//   says why in the report; all lanes of the block leave the kernel together, and mark
//   it in all windows, so that the other blocks and the peers' kernels end as well. With it
//   goes what the call was, so that ranks whose calls differ can name both.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/flag.h"
#include "core/peers.h"
#include "gpu/collectives/kernel_args.h"
#include "gpu/collectives/target.h"

namespace dreamcomm::gpu {

template <Target T>
class BlockRounds {
 public:
  /// All lanes of a block make one, and call everything together.
  DREAMCOMM_DEVICE BlockRounds(const T& target, const KernelArgs& args)
      : target_(target),
        args_(args),
        last_(static_cast<std::uint32_t>(args.rounds[target.block()])) {}

  /// Before anything else: false if a rank has aborted the group. If it is this one, peers
  /// may still read its pages of the call that failed, which later kernels, queued already,
  /// must not write. If it is another, its words of that call may wait here for us.
  /// Here all lanes meet: nobody stores the last round before all have read it.
  DREAMCOMM_DEVICE bool may_begin() const {
    int gone = -1;
    // A mark for each lane: all calls wait for them.
    for (int r = target_.lane(); r < args_.size; r += target_.lanes()) {
      if (target_.peek(&mark(args_.rank, r).gone) != 0) gone = r;
    }
    if (gone >= 0) give_up(Report::kPeerGone, gone, last_ + 1);
    return !target_.any(gone >= 0);
  }

  DREAMCOMM_DEVICE int rank() const { return args_.rank; }
  DREAMCOMM_DEVICE int size() const { return args_.size; }
  DREAMCOMM_DEVICE std::size_t page_bytes() const { return args_.layout.page_bytes; }

  /// This rank's page of the coming round.
  DREAMCOMM_DEVICE std::byte* page() const { return page_of(args_.rank, last_ + 1); }
  /// A rank's page of the last turn.
  DREAMCOMM_DEVICE const std::byte* from(int rank) const { return page_of(rank, last_); }

  /// As Rounds::turn; false if the block has to give up, and then on all its lanes.
  DREAMCOMM_DEVICE_LOOP bool turn(Peers reads, Peers readers) {
    const std::uint32_t round = last_ + 1;
    target_.meet();
    bool lost = false;
    for (int peer = target_.lane(); peer < args_.size; peer += target_.lanes()) {
      if (peer == args_.rank) continue;
      target_.publish(&slot(peer, args_.rank).published[round & 1U], word(round));
    }
    for (int peer = target_.lane(); peer < args_.size && !lost; peer += target_.lanes()) {
      const bool awaited = turns_ == 0 || reads.has(peer) || readers_.has(peer);
      if (awaited && peer != args_.rank) lost = !await(peer, round);
    }
    if (!stays(!lost)) return false;
    last_ = round;
    readers_ = readers;
    ++turns_;
    return true;
  }

  /// The number of the coming round.
  DREAMCOMM_DEVICE std::uint32_t coming() const { return last_ + 1; }
  /// Waits in the coming round for what a peer writes; false to give up, and then with all lanes.
  template <typename IsThere>
  DREAMCOMM_DEVICE bool wait_for(int peer, const IsThere& is_there) const {
    return await(peer, coming(), is_there);
  }
  /// The only turn of a call by letters, all of which are on their way: `take` takes this lane's
  /// first ones meanwhile, and returns false to give up.
  template <typename Take>
  DREAMCOMM_DEVICE bool turn_by_packets(const Take& take) {
    const std::uint32_t round = last_ + 1;
    for (int peer = target_.lane(); peer < args_.size; peer += target_.lanes()) {
      if (peer == args_.rank) continue;
      target_.tell(&slot(peer, args_.rank).published[round & 1U], word(round));
    }
    bool lost = !take();
    for (int peer = target_.lane(); peer < args_.size && !lost; peer += target_.lanes()) {
      if (peer != args_.rank) lost = !await(peer, round);
    }
    return stays(!lost);
  }
  /// After that turn, and once all lanes have taken the rest: false to give up.
  DREAMCOMM_DEVICE bool close_packets(bool all_taken) {
    if (!stays(all_taken)) return false;
    ++last_;
    close();
    return true;
  }

  /// Ends the call on all ranks, who all found the same contradiction.
  DREAMCOMM_DEVICE void refuse_sizes(int giver, int taker, std::uint64_t given,
                                     std::uint64_t expected) const {
    if (target_.lane() == 0 && target_.claim(&args_.report->claimed, 1)) {
      args_.report->taker = taker;
      args_.report->given = given;
      args_.report->expected = expected;
      write_report(Report::kSizes, giver, last_);
    }
    tell_all();
  }

  /// After the last turn of the call: the next one goes on from here.
  DREAMCOMM_DEVICE void close() const {
    if (target_.lane() == 0) args_.rounds[target_.block()] = last_;
  }

 private:
  DREAMCOMM_DEVICE std::byte* page_of(int rank, std::uint32_t round) const {
    return args_.windows[rank] + args_.layout.page(target_.block(), round);
  }
  /// The words that `writer` writes into the window of `owner`.
  DREAMCOMM_DEVICE Slot& slot(int owner, int writer) const {
    return *reinterpret_cast<Slot*>(args_.windows[owner] + Layout::slot(target_.block(), writer));
  }
  DREAMCOMM_DEVICE Mark& mark(int owner, int writer) const {
    return *reinterpret_cast<Mark*>(args_.windows[owner] + Layout::mark(writer));
  }
  DREAMCOMM_DEVICE std::uint64_t word(std::uint32_t round) const {
    return std::uint64_t{round} << 32U | digest(args_.info);
  }

  /// Whether no lane has lost a peer; else all ranks are told.
  DREAMCOMM_DEVICE bool stays(bool well) const {
    if (!target_.any(!well)) return true;
    tell_all();
    return false;
  }

  /// What a peer has published: whether its call is another one, and whether it has come.
  struct Sight {
    bool differs;
    bool has_come;
  };
  DREAMCOMM_DEVICE Sight look_at(int peer, std::uint64_t expected) const {
    const auto round = static_cast<std::uint32_t>(expected >> 32U);
    const std::uint64_t seen = target_.read(&slot(args_.rank, peer).published[round & 1U]);
    const auto theirs = static_cast<std::uint32_t>(seen >> 32U);
    return {theirs == round && seen != expected, reached(theirs, round)};
  }
  DREAMCOMM_DEVICE bool await(int peer, std::uint32_t round) const {
    const std::uint64_t expected = word(round);
    bool differs = false;
    const auto is_there = [&] {
      const Sight sight = look_at(peer, expected);
      differs = sight.differs;
      return sight.has_come;
    };
    if (!await(peer, round, is_there)) return false;
    return !differs || give_up(Report::kMismatch, peer, round);
  }

  /// A reason to stop makes it look once more: what it waits for may have come in the meantime.
  template <typename IsThere>
  DREAMCOMM_DEVICE bool await(int peer, std::uint32_t round, const IsThere& is_there) const {
    std::uint64_t begin = 0;  // not known before a while has passed: clocks are slow to read
    int stop = Report::kNone;
    int missing = peer;
    for (std::uint32_t looks = 1;; ++looks) {
      if (is_there()) return true;
      if (looks % 64 == 0 || stop != Report::kNone) {
        const int other = one_that_differs(round);
        if (other >= 0) return give_up(Report::kMismatch, other, round);
      }
      if (stop != Report::kNone) return give_up(stop, missing, round);
      target_.pause();
      if (looks % 64 != 0) continue;
      if (begin == 0) begin = target_.now();
      const int gone = one_gone();
      if (gone >= 0) {
        stop = Report::kPeerGone;
        missing = gone;
      } else if (looks % 1024 == 0 && target_.read(&args_.control->abort) != 0) {
        stop = Report::kAborted;
      } else if (static_cast<std::int64_t>(target_.now() - begin) > args_.patience_ns) {
        stop = Report::kTimeout;
      }
    }
  }

  /// A rank that has made another call in this round, also one that is not waited for; or -1.
  DREAMCOMM_DEVICE int one_that_differs(std::uint32_t round) const {
    for (int r = 0; r < args_.size; ++r) {
      if (r != args_.rank && look_at(r, word(round)).differs) return r;
    }
    return -1;
  }

  /// A rank that has given up, also one that is not waited for: it may be why the awaited
  /// one does not come; this rank itself, if another block has. Or -1.
  DREAMCOMM_DEVICE int one_gone() const {
    for (int r = 0; r < args_.size; ++r) {
      if (target_.read(&mark(args_.rank, r).gone) != 0) return r;
    }
    return -1;
  }

  /// The first lane of the rank that gives up says why, once and for all. Always false.
  DREAMCOMM_DEVICE bool give_up(int reason, int missing, std::uint32_t round) const {
    if (target_.claim(&args_.report->claimed, 1)) write_report(reason, missing, round);
    return false;
  }

  DREAMCOMM_DEVICE void write_report(int reason, int missing, std::uint32_t round) const {
    Report& report = *args_.report;
    report.rank = args_.rank;
    report.missing = missing;
    report.patience_ns = args_.patience_ns;
    report.sequence = args_.sequence;
    report.round = round;
    report.turn = turns_;
    report.block = target_.block();
    report.info = args_.info;
    tell_card();
    if (reason == Report::kMismatch) hear_card(missing);
    target_.publish(&report.reason, static_cast<std::uint64_t>(reason));
  }

  /// Whoever made another call finds that out in its own first turn, and says which. INVARIANT:
  /// one lane of a rank comes here, once, as it has claimed the report.
  DREAMCOMM_DEVICE void tell_card() const {
    for (int peer = 0; peer < args_.size; ++peer) {
      Mark& to = mark(peer, args_.rank);
      to.info = args_.info;
      target_.publish(&to.told, 1);
    }
  }
  DREAMCOMM_DEVICE void hear_card(int peer) const {
    constexpr std::uint64_t kLongestNs = 200'000'000;
    Mark& from = mark(args_.rank, peer);
    const std::uint64_t begin = target_.now();
    while (target_.read(&from.told) == 0) {
      if (target_.now() - begin > kLongestNs) return;
      target_.pause();
    }
    args_.report->theirs = from.info;
    args_.report->heard = 1;
  }

  DREAMCOMM_DEVICE void tell_all() const {
    for (int peer = target_.lane(); peer < args_.size; peer += target_.lanes()) {
      target_.publish(&mark(peer, args_.rank).gone, 1);
    }
  }

  const T& target_;
  const KernelArgs& args_;
  std::uint32_t last_;  // round published
  std::uint32_t turns_ = 0;
  Peers readers_ = Peers::none();  // who read this rank's page of the last round
};

}  // namespace dreamcomm::gpu

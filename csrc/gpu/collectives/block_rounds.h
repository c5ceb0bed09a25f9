// Rounds between block b of all ranks: transport/rounds.h, on the GPU.
//
// The protocol and its proof are those of the CPU's rounds, with "the rank" read as
// "block b of the rank": two alternating pages, and a turn that waits for the ranks whose pages
// this one reads and for those that read this rank's page of the previous round. Four things
// differ.
//
//   Lanes. All lanes of the block write the page. A barrier of the lanes precedes lane p's
//   publication of the round to rank p, so that the publication follows all their writes. Lane p
//   sees rank p's word; another barrier follows before any lane reads. Release and acquire are
//   cumulative: one lane may publish what another has written.
//
//   Words. A rank writes its word into its peers' windows, so that each polls its own memory. A
//   word holds the round and the digest of the call. The first turn of a call, in round r, waits
//   for all ranks. A rank that publishes r+1 has compared all words of r, so all calls were equal.
//   A rank that still waits then finds words of equal calls: of r, or of r+2 in the same place (a
//   word for each parity). So every rank that cannot continue finds the peer that made another
//   call, before data moves.
//
//   LL packets (ll_packets.h) are used with a word that is not ordered after the call's accesses.
//
//   Failure. A wait ends after `patience_ns`, when the host orders it, or when any rank or another
//   block of this rank has failed. The first lane of the rank that notices writes the reason into
//   the report. All lanes of the block leave the kernel together and mark the failure in all
//   windows, so that the other blocks and the peers' kernels end as well. The mark holds the call,
//   so that ranks whose calls differ can name both.
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
  /// All lanes of a block construct one, and make every call on it together.
  DREAMCOMM_DEVICE BlockRounds(const T& target, const KernelArgs& args)
      : target_(target),
        args_(args),
        last_(static_cast<std::uint32_t>(args.rounds[target.block()])) {}

  /// Returns false if a rank has failed in an earlier call; comes before anything else. If this
  /// rank has failed, peers may still read its pages of that call, so kernels that are already
  /// queued must not write them. If another has failed, its words of that call may still be in
  /// this rank's window. A barrier of all lanes: no lane stores the last round before all have
  /// read it.
  DREAMCOMM_DEVICE bool may_begin() const {
    int failed = -1;
    // Each lane reads one mark, since every call waits for this.
    for (int r = target_.lane(); r < args_.size; r += target_.lanes()) {
      if (target_.read_relaxed(&mark(args_.rank, r).failed) != 0) failed = r;
    }
    if (failed >= 0) fail(Report::kPeerFailed, failed, last_ + 1);
    return !target_.any(failed >= 0);
  }

  DREAMCOMM_DEVICE int rank() const { return args_.rank; }
  DREAMCOMM_DEVICE int size() const { return args_.size; }
  DREAMCOMM_DEVICE std::size_t page_bytes() const { return args_.layout.page_bytes; }

  /// This rank's page of the next round.
  DREAMCOMM_DEVICE std::byte* page() const { return page_of(args_.rank, last_ + 1); }
  /// A rank's page of the last turn.
  DREAMCOMM_DEVICE const std::byte* from(int rank) const { return page_of(rank, last_); }

  /// Like Rounds::turn. Returns false if the block has to end, and then on all its lanes.
  DREAMCOMM_DEVICE_LOOP bool turn(Peers reads, Peers readers) {
    const std::uint32_t round = last_ + 1;
    target_.sync();
    bool lost = false;
    for (int peer = target_.lane(); peer < args_.size; peer += target_.lanes()) {
      if (peer == args_.rank) continue;
      target_.publish(&slot(peer, args_.rank).published[round & 1U], word(round));
    }
    for (int peer = target_.lane(); peer < args_.size && !lost; peer += target_.lanes()) {
      const bool awaited = turns_ == 0 || reads.has(peer) || readers_.has(peer);
      if (awaited && peer != args_.rank) lost = !await(peer, round);
    }
    if (!all_ok(!lost)) return false;
    last_ = round;
    readers_ = readers;
    ++turns_;
    return true;
  }

  /// The number of the next round.
  DREAMCOMM_DEVICE std::uint32_t coming() const { return last_ + 1; }
  /// Waits in the next round until a peer's write has arrived. Returns false if the block has to
  /// end; then all its lanes have to.
  template <typename IsThere>
  DREAMCOMM_DEVICE bool wait_for(int peer, const IsThere& is_there) const {
    return await(peer, coming(), is_there);
  }
  /// The only turn of a call by packets, all of which have been written. Meanwhile `take` takes
  /// this lane's first ones; it returns false if the block has to end.
  template <typename Take>
  DREAMCOMM_DEVICE bool turn_by_packets(const Take& take) {
    const std::uint32_t round = last_ + 1;
    for (int peer = target_.lane(); peer < args_.size; peer += target_.lanes()) {
      if (peer == args_.rank) continue;
      target_.write_relaxed(&slot(peer, args_.rank).published[round & 1U], word(round));
    }
    bool lost = !take();
    for (int peer = target_.lane(); peer < args_.size && !lost; peer += target_.lanes()) {
      if (peer != args_.rank) lost = !await(peer, round);
    }
    return all_ok(!lost);
  }
  /// Ends that call, once all lanes have taken the rest. Returns false if the block has to end.
  DREAMCOMM_DEVICE bool close_packets(bool all_taken) {
    if (!all_ok(all_taken)) return false;
    ++last_;
    close();
    return true;
  }

  /// Ends the call on all ranks, which have all found the same contradiction.
  DREAMCOMM_DEVICE void refuse_sizes(int giver, int taker, std::uint64_t given,
                                     std::uint64_t expected) const {
    if (target_.lane() == 0 && target_.claim(&args_.report->claimed, 1)) {
      args_.report->taker = taker;
      args_.report->given = given;
      args_.report->expected = expected;
      write_report(Report::kSizes, giver, last_);
    }
    mark_failed();
  }

  /// Stores the last round, after the call's last turn; the next call continues from it.
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

  /// True if no lane has failed; otherwise marks the failure in all windows.
  DREAMCOMM_DEVICE bool all_ok(bool ok) const {
    if (!target_.any(!ok)) return true;
    mark_failed();
    return false;
  }

  /// A peer's state from its word: whether its call is another one, and whether it has arrived.
  struct PeerState {
    bool differs;
    bool has_arrived;
  };
  DREAMCOMM_DEVICE PeerState state_of(int peer, std::uint64_t expected) const {
    const auto round = static_cast<std::uint32_t>(expected >> 32U);
    const std::uint64_t seen = target_.read(&slot(args_.rank, peer).published[round & 1U]);
    const auto theirs = static_cast<std::uint32_t>(seen >> 32U);
    return {theirs == round && seen != expected, reached(theirs, round)};
  }
  DREAMCOMM_DEVICE bool await(int peer, std::uint32_t round) const {
    const std::uint64_t expected = word(round);
    bool differs = false;
    const auto is_there = [&] {
      const PeerState state = state_of(peer, expected);
      differs = state.differs;
      return state.has_arrived;
    };
    if (!await(peer, round, is_there)) return false;
    return !differs || fail(Report::kMismatch, peer, round);
  }

  /// A reason to stop makes it check once more: what it waits for may have arrived meanwhile.
  template <typename IsThere>
  DREAMCOMM_DEVICE bool await(int peer, std::uint32_t round, const IsThere& is_there) const {
    std::uint64_t begin = 0;  // read late, because clocks are slow to read
    int stop = Report::kNone;
    int missing = peer;
    for (std::uint32_t looks = 1;; ++looks) {
      if (is_there()) return true;
      if (looks % 64 == 0 || stop != Report::kNone) {
        const int other = one_that_differs(round);
        if (other >= 0) return fail(Report::kMismatch, other, round);
      }
      if (stop != Report::kNone) return fail(stop, missing, round);
      target_.pause();
      if (looks % 64 != 0) continue;
      if (begin == 0) begin = target_.now();
      const int failed = one_failed();
      if (failed >= 0) {
        stop = Report::kPeerFailed;
        missing = failed;
      } else if (looks % 1024 == 0 && target_.read(&args_.control->abort) != 0) {
        stop = Report::kAborted;
      } else if (static_cast<std::int64_t>(target_.now() - begin) > args_.patience_ns) {
        stop = Report::kTimeout;
      }
    }
  }

  /// A rank that has made another call in this round, awaited or not; or -1.
  DREAMCOMM_DEVICE int one_that_differs(std::uint32_t round) const {
    for (int r = 0; r < args_.size; ++r) {
      if (r != args_.rank && state_of(r, word(round)).differs) return r;
    }
    return -1;
  }

  /// A rank that has failed, or -1. It may be a rank that is not awaited, since its failure may
  /// be why the awaited rank does not arrive. It is this rank if another block of it has failed.
  DREAMCOMM_DEVICE int one_failed() const {
    for (int r = 0; r < args_.size; ++r) {
      if (target_.read(&mark(args_.rank, r).failed) != 0) return r;
    }
    return -1;
  }

  /// Writes the report, on the first lane of the rank that fails only. Always returns false.
  DREAMCOMM_DEVICE bool fail(int reason, int missing, std::uint32_t round) const {
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
    publish_call();
    if (reason == Report::kMismatch) read_call_of(missing);
    target_.publish(&report.reason, static_cast<std::uint64_t>(reason));
  }

  /// Writes this rank's call into all windows. A rank that made another call finds the difference
  /// in its own first turn, and does the same. INVARIANT: only one lane of a rank runs this, once,
  /// because it has claimed the report.
  DREAMCOMM_DEVICE void publish_call() const {
    for (int peer = 0; peer < args_.size; ++peer) {
      Mark& to = mark(peer, args_.rank);
      to.info = args_.info;
      target_.publish(&to.has_info, 1);
    }
  }
  DREAMCOMM_DEVICE void read_call_of(int peer) const {
    constexpr std::uint64_t kLongestNs = 200'000'000;
    Mark& from = mark(args_.rank, peer);
    const std::uint64_t begin = target_.now();
    while (target_.read(&from.has_info) == 0) {
      if (target_.now() - begin > kLongestNs) return;
      target_.pause();
    }
    args_.report->theirs = from.info;
    args_.report->has_theirs = 1;
  }

  DREAMCOMM_DEVICE void mark_failed() const {
    for (int peer = target_.lane(); peer < args_.size; peer += target_.lanes()) {
      target_.publish(&mark(peer, args_.rank).failed, 1);
    }
  }

  const T& target_;
  const KernelArgs& args_;
  std::uint32_t last_;  // round published
  std::uint32_t turns_ = 0;
  Peers readers_ = Peers::none();  // ranks that read this rank's page of the last round
};

}  // namespace dreamcomm::gpu

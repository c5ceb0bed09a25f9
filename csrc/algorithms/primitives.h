// One call's primitives: they run its rounds and count the bytes it moves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "algorithms/adaptive_copy.h"
#include "algorithms/signature.h"
#include "core/request.h"
#include "core/timeline.h"
#include "core/tsc_clock.h"
#include "kernels/reduce.h"
#include "transport/rounds.h"

namespace dreamcomm {

/// memcpy that accepts null for no bytes.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

constexpr std::size_t align_down(std::size_t n, std::size_t unit) { return n / unit * unit; }

struct Preference;  // algorithms/table.h

class Primitives {
 public:
  /// Bytes at the start of each page that belong to the signature.
  static constexpr std::size_t kSignature = 64;
  /// Placed on cache lines of their own: no two ranks write one line.
  static constexpr std::size_t kAlign = 64;

  /// Memory for one thing of each rank, allocated once per group.
  struct Scratch {
    explicit Scratch(int size)
        : sources(static_cast<std::size_t>(size)),
          factors(static_cast<std::size_t>(size)),
          counts(static_cast<std::size_t>(size)),
          ins(static_cast<std::size_t>(size)),
          outs(static_cast<std::size_t>(size)),
          targets(static_cast<std::size_t>(size)) {}
    std::vector<const std::byte*> sources;
    std::vector<double> factors;
    std::vector<std::uint64_t> counts;
    std::vector<const std::byte*> ins;  // as mapped here; null: not in its rank's heap
    std::vector<std::byte*> outs;
    std::vector<std::byte*> targets;
    AdaptiveCopy writer;
    TscClock clock;     // of the thread whose turn it is
    std::string group;  // "group '1'", for errors; empty: the default one
    /// Returns where in the program this thread makes its call; may be empty, or return "".
    std::function<std::string()> call_site;
    const std::string* refusal = nullptr;  // as in Request
    /// Records the phases of the call; null: does not.
    Timeline* timeline = nullptr;
  };

  /// `preference` determines when heaps are worth it, for rows that find out during the call; null:
  /// never. `now_ns`: when the call was entered. `counts`: as Reduction::counts.
  Primitives(Rounds& rounds, const Opening& opening, WaitObserver& observer, Scratch& scratch,
             const Preference* preference = nullptr, std::int64_t now_ns = 0,
             GradientCounts* counts = nullptr);

  ~Primitives() { scratch_.writer.close(); }
  Primitives(const Primitives&) = delete;
  Primitives& operator=(const Primitives&) = delete;

  int rank() const { return rounds_.rank(); }
  int size() const { return rounds_.size(); }
  int left() const { return (rank() + size() - 1) % size(); }
  int right() const { return (rank() + 1) % size(); }

  /// Where to write what the peers read after the coming turn; `room()` bytes.
  std::byte* page() const { return rounds_.page() + kSignature; }
  std::size_t room() const { return rounds_.page_bytes() - kSignature; }

  /// Lets the ranks in `readers` read the page, and this rank the pages of those in `reads`. The
  /// first turn of a call is among all: it compares the signatures and throws Error(kMismatch) on
  /// every rank if two differ, or a rank has no count.
  void exchange(Peers reads, Peers readers);
  /// A first turn that moves nothing: after it all ranks know whose blocks lie in heaps. These must
  /// not be read before it, or written after the last turn.
  void open() { exchange(Peers::all(), Peers::all()); }
  /// A rank's input or output in its heap, as this rank maps it, or null.
  const std::byte* in(int rank) const { return scratch_.ins[static_cast<std::size_t>(rank)]; }
  std::byte* out(int rank) const { return scratch_.outs[static_cast<std::size_t>(rank)]; }
  bool all_in() const;
  bool all_out() const;
  /// True if this rank's input lies in its heap; also valid before the first turn.
  bool is_own_in() const { return opening_.in != 0; }
  /// True if a call of the kind that has `bytes` of input on a rank should use heaps.
  bool prefers_heaps(Kind kind, std::size_t bytes) const;
  /// True if tensors in heaps were read or written in place.
  bool was_in_place() const { return in_place_; }
  const std::byte* from(int rank) const { return rounds_.from(rank) + kSignature; }

  /// Reduces, per rank, `own` or the bytes at `offset` of a peer's page, in rank
  /// order, and counts what was read.
  void reduce_all(const Reduction& how, const std::byte* own, std::size_t offset, std::byte* out,
                  std::size_t count);
  /// The same, into two places.
  void reduce_all(const Reduction& how, const std::byte* own, std::size_t offset,
                  const std::array<std::byte*, 2>& outs, std::size_t count);
  /// Reduces, per rank, the bytes at `offset` of its input in its heap.
  void reduce_heap(const Reduction& how, std::size_t offset, std::byte* out, std::size_t count);
  /// The same, into the outputs in their heaps of the ranks in `into`.
  void reduce_heaps(const Reduction& how, std::size_t offset, Peers into, std::size_t count);
  /// Copies from a rank's input in its heap and, if it is a peer's, counts it.
  void pull(std::byte* to, int rank, std::size_t offset, std::size_t bytes);
  /// Copies from a peer's page and counts it.
  void get(std::byte* to, int rank, std::size_t offset, std::size_t bytes);
  /// Copies into this rank's output from its own memory.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);
  /// Combines `own` with the bytes of the left neighbour's page, and counts what was read.
  void combine_left(const Reduction& how, const std::byte* own, std::byte* out, std::size_t count);
  /// Copies into this rank's page for `readers` ranks to read, and counts it.
  void put(std::size_t offset, const std::byte* data, std::size_t bytes, int readers);

  /// Returns where a rank made its call, as " at FILE:LINE in FUNCTION", or "".
  using SiteOf = std::function<std::string(int rank)>;
  /// Ends a call in which the ranks' arguments contradict each other. All ranks must have found the
  /// mismatch in the same round, before data was moved. Throws Error(kMismatch) with "the ranks
  /// made different calls: " and `told`.
  [[noreturn]] void end_mismatched(const std::function<std::string(const SiteOf&)>& told);

  /// Where a tensor of this rank lies in its heap, from 1 on; 0: null, which is nowhere. Throws
  /// Error(kInvalid) for other memory.
  std::uint64_t place_of(const std::byte* data) const;
  /// A rank's tensor at such a place, as this rank maps it; null for 0.
  std::byte* at_place(int rank, std::uint64_t place);
  /// Assigns the time since the last mark to this phase, in which tensors in heaps were used.
  void worked(Phase phase) {
    in_place_ = true;
    mark(phase);
  }

  void count_sent(std::size_t bytes) { sent_ += bytes; }
  void count_received(std::size_t bytes) { received_ += bytes; }
  std::uint64_t sent() const { return sent_; }
  std::uint64_t received() const { return received_; }
  /// The call's number in its group, as texts show it.
  std::uint64_t sequence() const { return opening_.signature.sequence; }
  /// Which rank entered the call last, and when. Valid after the first turn.
  const Arrival& arrival() const { return arrival_; }

 private:
  using SiteText = std::array<char, 512>;

  /// Assigns the time since the last mark to this phase.
  void mark(Phase phase) {
    if (scratch_.timeline != nullptr) [[unlikely]]
      scratch_.timeline->mark(phase, scratch_.clock.now_ns());
  }
  void compare_openings();
  void gather_sources(const std::byte* own, std::size_t offset);
  Reduction scaled(const Reduction& how) const;
  void reduce_sources(const Reduction& how, std::byte* out, std::size_t count);

  Rounds& rounds_;
  Opening opening_;
  WaitObserver& observer_;
  Scratch& scratch_;
  const Preference* preference_;
  GradientCounts* const counts_;
  Arrival arrival_;
  bool first_ = true;
  bool in_place_ = false;
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
};

}  // namespace dreamcomm

// Notes where the time of a collective goes. A phase lasts from the end of the one before it, so
// one look at the clock ends a phase and begins the next.
#pragma once

#include "core/record.h"
#include "core/seqlock_ring.h"

namespace dreamcomm {

class Timeline {
 public:
  /// Keeps the last `spans`.
  explicit Timeline(std::size_t internode) : ring_(internode) {}

  /// A collective begins. The writer's, as is mark().
  void begin(std::int64_t call, std::int64_t now_ns) {
    call_ = call;
    last_ns_ = now_ns;
    open_ = {};
  }
  /// What was done since the last mark was of this phase.
  void mark(Phase phase, std::int64_t now_ns) {
    const std::int64_t begin = last_ns_;
    last_ns_ = now_ns;
    if (open_.call == call_ && open_.phase == phase) {
      open_.end_ns = now_ns;
      ring_.amend(open_);
      return;
    }
    open_ = {.call = call_, .begin_ns = begin, .end_ns = now_ns, .phase = phase};
    ring_.add(open_);
  }

  /// Something of its own, which neither ends a phase nor begins one. The writer's.
  void note(const Span& span) {
    open_ = {};
    ring_.add(span);
  }

  /// When the last phase ended, or the call began. The writer's.
  std::int64_t last_ns() const { return last_ns_; }
  const SeqlockRing<Span>& internode() const { return ring_; }

 private:
  SeqlockRing<Span> ring_;
  std::int64_t call_ = 0;
  std::int64_t last_ns_ = 0;
  Span open_;
};

}  // namespace dreamcomm

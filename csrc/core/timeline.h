// Records where the time of a collective goes. A phase begins when the one before it ends, so one
// read of the clock ends a phase and begins the next.
#pragma once

#include "core/record.h"
#include "core/seqlock_ring.h"

namespace dreamcomm {

class Timeline {
 public:
  /// Keeps the last `spans`.
  explicit Timeline(std::size_t spans) : ring_(spans) {}

  /// Begins a collective. Only the writer calls this and mark().
  void begin(std::int64_t call, std::int64_t now_ns) {
    call_ = call;
    last_ns_ = now_ns;
    open_ = {};
  }
  /// Assigns the time since the last mark to this phase.
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

  /// Records a span that neither ends a phase nor begins one. Only the writer calls this.
  void note(const Span& span) {
    open_ = {};
    ring_.add(span);
  }

  /// When the last phase ended, or the call began. Only the writer calls this.
  std::int64_t last_ns() const { return last_ns_; }
  const SeqlockRing<Span>& spans() const { return ring_; }

 private:
  SeqlockRing<Span> ring_;
  std::int64_t call_ = 0;
  std::int64_t last_ns_ = 0;
  Span open_;
};

}  // namespace dreamcomm

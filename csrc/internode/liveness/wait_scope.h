// A wait for messages of other hosts, as observers see it: its rank, and its duration.
#pragma once

#include <chrono>
#include <cstdint>

#include "core/record.h"
#include "core/request.h"
#include "core/timeline.h"
#include "transport/window.h"

namespace dreamcomm {

class WaitScope {
 public:
  /// `timeline` may be null.
  WaitScope(Progress& shown, Timeline* timeline, std::int64_t number)
      : shown_(shown), timeline_(timeline), number_(number) {}
  ~WaitScope() {
    shown_.waiting_for.set(-1);
    if (timeline_ == nullptr) return;
    timeline_->note(
        {.call = number_, .begin_ns = begin_, .end_ns = now_ns(), .phase = Phase::kBetween});
  }
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

  /// The wait has lasted a while, and is for `rank`.
  void lasts(int rank) { shown_.waiting_for.set(rank); }
  /// A message from or to that rank has finished.
  void moved(int rank) {
    constexpr std::int64_t kFelt = 2000;  // nanoseconds; what takes less was there already
    const std::int64_t now = now_ns();
    if (now - before_ > kFelt) last_ = {now, rank};
    before_ = now;
  }
  /// The awaited rank whose message finished last.
  LastToCome last() const { return last_; }

 private:
  Progress& shown_;
  Timeline* const timeline_;
  const std::int64_t number_;
  const std::int64_t begin_ = now_ns();
  std::int64_t before_ = begin_;
  LastToCome last_;
};

}  // namespace dreamcomm

// What the leaders of a monitored barrier between hosts post; see monitored_barrier.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "comm/barrier/remote_barrier.h"

namespace dreamcomm::barrier {

/// Of a leader but rank 0.
struct Report {
  enum class State : int { kNone, kIn, kCounted, kOver, kLeft };
  std::uint32_t number = 0;  // of the roll call
  State state = State::kNone;
  std::int64_t issued = 0;   // collectives, when it came, or left
  std::int64_t before = -1;  // when it left the one before; -1: there was none
  int over = -1;             // a rank whose timeout has ended
  BarrierCount count;        // of one that has left: its problem is why

  bool has_count() const { return state == State::kCounted || state == State::kOver; }
  /// Roll calls, up to this one.
  std::uint32_t left() const { return number + (state == State::kLeft ? 1U : 0U); }
};

/// Of rank 0.
struct Verdict {
  std::uint32_t ended = 0;               // roll calls
  std::uint32_t passed = 0;              // the last that passed, from 1 on
  std::uint32_t in = 0;                  // the one that it is in, from 1 on, or 0
  std::int64_t came = 0;                 // collectives, when it came to that
  std::uint32_t asks = 0;                // likewise, if it asks who is missing
  std::array<std::int64_t, 8> issued{};  // at the end of roll call n, at n % 8
  BarrierOutcome outcome;                // of the last that has ended
};

std::string to_text(const Report& report);
std::string to_text(const Verdict& verdict);
/// Of "" what has never been posted.
Report report_from(const std::string& text);
Verdict verdict_from(const std::string& text);

}  // namespace dreamcomm::barrier

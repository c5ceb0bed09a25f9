// The posts of the leaders of a monitored barrier between hosts; see monitored_barrier.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "comm/barrier/remote_barrier.h"

namespace dreamcomm::barrier {

/// The post of a leader other than rank 0.
struct Report {
  enum class State : int { kNone, kIn, kCounted, kOver, kLeft };
  std::uint32_t number = 0;  // of the barrier
  State state = State::kNone;
  std::int64_t issued = 0;   // collectives, when it entered, or left
  std::int64_t before = -1;  // when it left the barrier before; -1: there was none
  int over = -1;             // a rank whose timeout has ended
  BarrierCount count;        // if it has left: the problem is the reason

  bool has_count() const { return state == State::kCounted || state == State::kOver; }
  /// Barriers that it has left, including this one.
  std::uint32_t left() const { return number + (state == State::kLeft ? 1U : 0U); }
};

/// The post of rank 0.
struct Verdict {
  std::uint32_t ended = 0;               // barriers that have ended
  std::uint32_t passed = 0;              // the last that passed, counted from 1
  std::uint32_t in = 0;                  // the barrier that it is in, counted from 1, or 0
  std::int64_t entered_with = 0;         // its collectives when it entered that one
  std::uint32_t asks = 0;                // the one in which it asks which ranks are missing, or 0
  std::array<std::int64_t, 8> issued{};  // at the end of barrier n, at n % 8
  BarrierOutcome outcome;                // of the last that has ended
};

std::string to_text(const Report& report);
std::string to_text(const Verdict& verdict);
/// Parses a post; "" means that none exists.
Report report_from(const std::string& text);
Verdict verdict_from(const std::string& text);

}  // namespace dreamcomm::barrier

// Keeps the calls of one rank in the order in which its threads made them.
#pragma once

#include <cstdint>

#include "core/flag.h"

namespace dreamcomm {

/// Numbers are handed out in order and served in order; one is served at a time.
class TicketLock {
 public:
  using Turn = std::uint32_t;
  Turn take() { return next_.take(); }
  bool is_up(Turn turn) const { return serving_.read() == turn; }
  /// Ends the turn; the caller wakes the threads that wait for theirs.
  void pass(Turn turn) { serving_.publish(turn + 1); }
  bool idle() const { return serving_.read() == next_.read(); }

 private:
  Flag next_;
  Flag serving_;
};

}  // namespace dreamcomm

// The monitored barrier: rank 0 calls the roll and says who is missing.
//
// It uses flags of its own, so a failed one leaves the collectives' order intact.
//   present  of each rank: odd while it is in a roll call
//   verdict  of rank 0: advances with every roll call it ends; the lowest bits
//            say what was wrong, the text beside it in words
// Rank 0 alone judges who is missing: a rank that gave up by itself would be missing, too.
// INVARIANT: rank 0 counts a presence once. It remembers the value it ended a
// roll call with, and a rank that comes again has a higher one.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "comm/guard.h"
#include "comm/member.h"

namespace dreamcomm {

class RollCall {
 public:
  explicit RollCall(Member& member);

  /// Returns when all ranks are in it. Throws Error(kTimeout) on every rank that is, naming the
  /// missing: the first, or `all` of them; Error(kPeerLost), and soon, where one cannot come.
  void hold(std::chrono::milliseconds timeout, bool all, const std::function<void()>& idle,
            const std::function<void()>& interrupt);

 private:
  struct Outcome {
    std::uint32_t bits = 0;
    std::string problem = {};
  };
  std::unique_lock<std::mutex> take_turn(std::chrono::milliseconds timeout,
                                         const std::function<void()>& idle,
                                         const std::function<void()>& interrupt);
  Outcome count(std::chrono::milliseconds timeout, bool all, const std::function<void()>& idle,
                const std::function<void()>& interrupt);
  void call(std::chrono::milliseconds timeout, bool all, const std::function<void()>& idle,
            const std::function<void()>& interrupt);
  void answer(std::chrono::milliseconds timeout, const std::function<void()>& idle,
              const std::function<void()>& interrupt);
  void await_all(Guard& guard, bool looks);
  bool is_present(int rank) const;
  int awaited() const;
  int awaited_beside_rank_0() const;
  std::string missing(std::chrono::milliseconds waited, bool all) const;
  void give_verdict(const Outcome& found);

  Member& member_;
  std::mutex mutex_;                    // one thread of the rank at a time
  std::vector<std::uint32_t> counted_;  // rank 0: presences of earlier roll calls
};

}  // namespace dreamcomm

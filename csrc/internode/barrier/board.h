// Short texts that ranks of all hosts can read, which nobody need come to give them.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace dreamcomm {

/// Of one rank. One thread at a time.
class BarrierBoard {
 public:
  BarrierBoard() = default;
  virtual ~BarrierBoard() = default;
  BarrierBoard(const BarrierBoard&) = delete;
  BarrierBoard& operator=(const BarrierBoard&) = delete;

  /// Takes the place of what was posted under the key. In the order given, but nobody waits for it.
  virtual void post(const std::string& key, const std::string& text) = 0;
  /// Whether what read() returns may have changed since it was last called. Costs little.
  virtual bool has_news() = 0;
  /// What had been posted under each of its keys a moment ago, "" for nothing. Looks once more
  /// meanwhile, and wakes the rank when it has. With `patience` it first waits so long for a look
  /// that begins now.
  virtual std::vector<std::string> read(std::chrono::milliseconds patience = {}) = 0;
};

}  // namespace dreamcomm

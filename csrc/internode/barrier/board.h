// Short texts that ranks post for ranks of all hosts to read, without exchanging messages.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace dreamcomm {

/// One rank's view of the board. One thread at a time.
class BarrierBoard {
 public:
  BarrierBoard() = default;
  virtual ~BarrierBoard() = default;
  BarrierBoard(const BarrierBoard&) = delete;
  BarrierBoard& operator=(const BarrierBoard&) = delete;

  /// Replaces what was posted under the key. Posts keep their order; the caller does not wait for
  /// them.
  virtual void post(const std::string& key, const std::string& text) = 0;
  /// True if read()'s result may have changed since the last call. It costs little.
  virtual bool has_news() = 0;
  /// Returns what had been posted under each of its keys a moment ago, "" for nothing. It starts
  /// another read meanwhile, and wakes the rank when that is done. With `patience` it first waits
  /// up to that long for a read that begins now.
  virtual std::vector<std::string> read(std::chrono::milliseconds patience = {}) = 0;
};

}  // namespace dreamcomm

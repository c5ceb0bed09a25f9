// The thread that calls another one back from a wait in which it cannot look about.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "transport/link.h"

namespace dreamcomm {

/// Costs a wait that is over soon no more than a lock: the thread sleeps while nothing is waited
/// for.
class WaitInterrupter {
 public:
  static constexpr std::chrono::milliseconds kTick{50};

  /// A wait is called back after one to two ticks.
  explicit WaitInterrupter(std::chrono::milliseconds tick = kTick) : tick_(tick) {}
  ~WaitInterrupter();
  WaitInterrupter(const WaitInterrupter&) = delete;
  WaitInterrupter& operator=(const WaitInterrupter&) = delete;

  /// As parcel.wait(), but false at times while it lasts, and soon after nudge(). One thread at a
  /// time.
  bool wait(Parcel& parcel);
  /// Calls back who waits now. Any thread.
  void interrupt();

 private:
  void work();

  const std::chrono::milliseconds tick_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Parcel* awaited_ = nullptr;
  std::uint64_t waits_ = 0;  // begun
  bool idle_ = true;         // the thread sleeps until it is told
  bool ending_ = false;
  std::thread thread_;  // from the first wait on
};

}  // namespace dreamcomm

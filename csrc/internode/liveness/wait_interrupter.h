// Interrupts a blocking Parcel::wait() every tick, so that its thread can check deadlines and
// peers.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "transport/link.h"

namespace dreamcomm {

/// A short wait costs only a lock: the interrupter's thread sleeps while no wait is under way.
class WaitInterrupter {
 public:
  static constexpr std::chrono::milliseconds kTick{50};

  /// A wait is interrupted after one to two ticks.
  explicit WaitInterrupter(std::chrono::milliseconds tick = kTick) : tick_(tick) {}
  ~WaitInterrupter();
  WaitInterrupter(const WaitInterrupter&) = delete;
  WaitInterrupter& operator=(const WaitInterrupter&) = delete;

  /// As parcel.wait(), but returns false now and then while it lasts, and soon after interrupt().
  /// One thread at a time.
  bool wait(Parcel& parcel);
  /// Interrupts the present wait. Any thread.
  void interrupt();

 private:
  void work();

  const std::chrono::milliseconds tick_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Parcel* awaited_ = nullptr;
  std::uint64_t waits_ = 0;  // begun
  bool idle_ = true;         // the thread sleeps until it is notified
  bool ending_ = false;
  std::thread thread_;  // from the first wait on
};

}  // namespace dreamcomm

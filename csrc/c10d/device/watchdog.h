// The thread that checks whether the ranks that kernels may wait for are alive.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace dreamcomm {

/// A kernel sees its peers' flags, but not their deaths; the host sees those, by their sockets.
/// INVARIANT: once `look` returns true, `tell` is called within two ticks, once, on the thread.
class DeviceWatchdog {
 public:
  static constexpr std::chrono::milliseconds kTick{100};

  /// Neither may throw.
  DeviceWatchdog(std::function<bool()> look, std::function<void()> tell);
  ~DeviceWatchdog();
  DeviceWatchdog(const DeviceWatchdog&) = delete;
  DeviceWatchdog& operator=(const DeviceWatchdog&) = delete;

 private:
  void work();

  const std::function<bool()> look_;
  const std::function<void()> tell_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace dreamcomm

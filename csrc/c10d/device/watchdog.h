// The thread that looks, while kernels may wait for a rank, whether that rank can still come.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace dreamcomm {

/// A kernel sees flags of its peers, not their deaths; the host does, by their sockets. INVARIANT:
/// `tell` is called within two ticks of the time from which `look` says true, once, and on the
/// thread.
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

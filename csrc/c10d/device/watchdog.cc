#include "c10d/device/watchdog.h"

#include <utility>

#include "core/signals.h"

namespace dreamcomm {

DeviceWatchdog::DeviceWatchdog(std::function<bool()> look, std::function<void()> tell)
    : look_(std::move(look)), tell_(std::move(tell)), thread_([this] { work(); }) {}

DeviceWatchdog::~DeviceWatchdog() {
  {
    const std::scoped_lock lock(mutex_);
    ending_ = true;
    changed_.notify_one();
  }
  thread_.join();
}

void DeviceWatchdog::work() {
  block_signals();
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kTick, [this] { return ending_; })) {
    lock.unlock();
    const bool over = look_();
    if (over) tell_();
    if (over) return;
    lock.lock();
  }
}

}  // namespace dreamcomm

// Counts the calls that are under way in the background.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace dreamcomm {

class Outstanding {
 public:
  void begin() {
    const std::scoped_lock lock(mutex_);
    ++count_;
  }
  void end() {
    {
      const std::scoped_lock lock(mutex_);
      --count_;
    }
    changed_.notify_all();
  }
  int count() const {
    const std::scoped_lock lock(mutex_);
    return count_;
  }
  /// Waits until none is left, for `longest` at most; returns whether none is.
  bool wait_none(std::chrono::milliseconds longest) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, longest, [this] { return count_ == 0; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

}  // namespace dreamcomm

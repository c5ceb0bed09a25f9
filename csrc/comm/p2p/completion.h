// A message under way. Thread-safe.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

namespace dreamcomm {

class Completion {
 public:
  using Callback = std::function<void(std::exception_ptr)>;

  bool done() const {
    std::scoped_lock lock(mutex_);
    return done_;
  }
  /// The error, or null. Valid when done.
  std::exception_ptr failure() const {
    std::scoped_lock lock(mutex_);
    return failure_;
  }
  /// The rank that a message came from. Valid when a receive is done.
  int source() const {
    std::scoped_lock lock(mutex_);
    return source_;
  }
  /// Claims a receive that waits in two places, within the host and for other hosts. INVARIANT: it
  /// gets the message of the place that claimed it first. Only that place finishes it, except that
  /// either may end it without a message.
  bool take() { return !taken_.exchange(true, std::memory_order_acq_rel); }
  bool taken() const { return taken_.load(std::memory_order_acquire); }
  /// Runs `callback` once: now if the message is done, otherwise when it is, on the thread that
  /// completes it. One callback at most.
  void then(Callback callback) {
    std::unique_lock lock(mutex_);
    if (!done_) {
      callback_ = std::move(callback);
      return;
    }
    lock.unlock();
    callback(failure_);
  }
  /// Ends the message; for the communicator. Later calls do nothing.
  void finish(int source, std::exception_ptr failure) {
    Callback callback;
    {
      std::scoped_lock lock(mutex_);
      if (done_) return;
      done_ = true;
      source_ = source;
      failure_ = failure;
      callback = std::move(callback_);
    }
    if (callback) callback(failure);
  }

 private:
  mutable std::mutex mutex_;
  bool done_ = false;
  int source_ = -1;
  std::exception_ptr failure_;
  Callback callback_;
  std::atomic<bool> taken_ = false;
};

}  // namespace dreamcomm

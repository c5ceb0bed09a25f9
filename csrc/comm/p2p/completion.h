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
  /// What it failed with, or null. Meaningful when done.
  std::exception_ptr failure() const {
    std::scoped_lock lock(mutex_);
    return failure_;
  }
  /// The rank a message came from. Meaningful when a receive is done.
  int source() const {
    std::scoped_lock lock(mutex_);
    return source_;
  }
  /// Of a receive that waits in two places, within the host and for other hosts. INVARIANT: it gets
  /// the message of the place that was the first to take it, and only that one finishes it, but
  /// for its end without a message.
  bool take() { return !taken_.exchange(true, std::memory_order_acq_rel); }
  bool taken() const { return taken_.load(std::memory_order_acquire); }
  /// Runs `callback` once: now if the ticket is done, else when it is, on the
  /// thread that completes it. One callback at the most.
  void then(Callback callback) {
    std::unique_lock lock(mutex_);
    if (!done_) {
      callback_ = std::move(callback);
      return;
    }
    lock.unlock();
    callback(failure_);
  }
  /// For the communicator: ends the message. Later calls do nothing.
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

// An accelerator for tests, whose streams are threads that work off queues, and whose memory is the
// host's. torch knows it as "privateuseone". Work that torch orders by streams and events really
// runs later and in parallel, so that missing order shows.
#pragma once

#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace dreamcomm::testing {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline constexpr int kDevices = 4;

/// A stream: tasks run one after the other on its own thread, for the life of the process. Some
/// begin a little late.
class Queue {
 public:
  Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  void put(std::function<void()> task);
  /// Waits until all that has been put so far has run.
  void wait();
  bool idle() const;

 private:
  void work();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
};

/// A point in a queue that other queues can wait for. Recorded again, it is another point.
class Mark {
 public:
  void record(Queue& queue);
  void block(Queue& queue) const;
  bool passed() const;
  void wait() const;

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool passed = false;
    void wait();
  };
  std::shared_ptr<State> state_;
};

Queue& queue_of(const c10::Stream& stream);
/// The current stream of this thread's current device.
c10::Stream current_stream();

}  // namespace dreamcomm::testing

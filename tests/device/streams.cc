#include "streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "memory.h"

namespace dreamcomm::testing {
namespace {

void begin_late_now_and_then() {
  thread_local std::minstd_rand random(std::random_device{}());
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
}

/// All streams, by number; those of a device begin with its default stream.
class Streams {
 public:
  Streams() {
    for (int device = 0; device < kDevices; ++device) add();
  }
  c10::StreamId add() {
    const std::scoped_lock lock(mutex_);
    queues_.push_back(std::make_unique<Queue>());
    return static_cast<c10::StreamId>(queues_.size()) - 1;
  }
  Queue& at(c10::StreamId id) {
    const std::scoped_lock lock(mutex_);
    return *queues_.at(static_cast<std::size_t>(id));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Queue>> queues_;
};

Streams& streams() {  // their threads run until the process ends
  static auto* const all = new Streams;
  return *all;
}

c10::Stream default_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device), device);
}

/// The current device and streams of a thread.
struct Current {
  c10::DeviceIndex device = 0;
  std::array<c10::StreamId, kDevices> streams{0, 1, 2, 3};
};
thread_local Current current;

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDeviceType, current.device}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) current.device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex index = device.has_index() ? device.index() : current.device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, index),
                       current.streams.at(static_cast<std::size_t>(index)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams().add());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current.streams.at(static_cast<std::size_t>(stream.device_index())) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark;
    static_cast<Mark*>(*event)->record(queue_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) static_cast<const Mark*>(event)->block(queue_of(stream));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<const Mark*>(event)->passed();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<const Mark*>(event)->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { queue_of(stream).wait(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_memory_on(data, queue_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

}  // namespace

Queue::Queue() {
  std::thread([this] { work(); }).detach();
}

void Queue::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    {
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      begin_late_now_and_then();
      task();
    }
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void Queue::put(std::function<void()> task) {
  const std::scoped_lock lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

bool Queue::idle() const {
  const std::scoped_lock lock(mutex_);
  return tasks_.empty() && !busy_;
}

void Queue::wait() {
  Mark mark;
  mark.record(*this);
  mark.wait();
}

void Mark::State::wait() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [this] { return passed; });
}

void Mark::record(Queue& queue) {
  state_ = std::make_shared<State>();
  queue.put([state = state_] {
    const std::scoped_lock lock(state->mutex);
    state->passed = true;
    state->changed.notify_all();
  });
}

void Mark::block(Queue& queue) const {
  if (state_) queue.put([state = state_] { state->wait(); });
}

bool Mark::passed() const {
  if (!state_) return true;
  const std::scoped_lock lock(state_->mutex);
  return state_->passed;
}

void Mark::wait() const {
  if (state_) state_->wait();
}

Queue& queue_of(const c10::Stream& stream) { return streams().at(stream.id()); }

c10::Stream current_stream() {
  const DeviceGuard guard;
  return guard.getStream(guard.getDevice());
}

}  // namespace dreamcomm::testing

#include "internode/liveness/wait_interrupter.h"

#include "core/signals.h"

namespace dreamcomm {
namespace {

/// Marks the wait as over, however it ends.
class Over {
 public:
  Over(std::mutex& mutex, Parcel*& awaited) : mutex_(mutex), awaited_(awaited) {}
  ~Over() {
    const std::scoped_lock lock(mutex_);
    awaited_ = nullptr;
  }
  Over(const Over&) = delete;
  Over& operator=(const Over&) = delete;

 private:
  std::mutex& mutex_;
  Parcel*& awaited_;
};

}  // namespace

WaitInterrupter::~WaitInterrupter() {
  {
    const std::scoped_lock lock(mutex_);
    ending_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

bool WaitInterrupter::wait(Parcel& parcel) {
  {
    const std::scoped_lock lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    awaited_ = &parcel;
    ++waits_;
    if (idle_) changed_.notify_one();
  }
  const Over over(mutex_, awaited_);
  return parcel.wait();
}

void WaitInterrupter::interrupt() {
  const std::scoped_lock lock(mutex_);
  if (awaited_ != nullptr) awaited_->interrupt();
}

/// An interrupt may come before the wait has begun and be lost: the next one follows after a tick.
void WaitInterrupter::work() {
  block_signals();
  std::unique_lock lock(mutex_);
  while (true) {
    idle_ = awaited_ == nullptr;
    if (idle_) changed_.wait(lock, [this] { return ending_ || awaited_ != nullptr; });
    idle_ = false;
    const std::uint64_t last = waits_;
    changed_.wait_for(lock, tick_, [this] { return ending_; });
    if (ending_) return;
    if (awaited_ != nullptr && waits_ == last) awaited_->interrupt();
  }
}

}  // namespace dreamcomm

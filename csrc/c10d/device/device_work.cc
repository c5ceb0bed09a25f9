#include "c10d/device/device_work.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// Between looks at whether the device is done.
constexpr std::chrono::microseconds kLook{20};

}  // namespace

DeviceWork::DeviceWork(int rank, const OpLabel& label, Tensors inputs, Tensors outputs,
                       const c10::Stream& stream, std::shared_ptr<const c10::Event> done,
                       bool captured, std::shared_ptr<const gpu::Communicator> group,
                       uint64_t sequence)
    : ProfiledWork(rank, label.type, label.title, inputs),
      label_(label),
      outputs_(outputs.vec()),
      stream_(stream),
      done_(std::move(done)),
      captured_(captured),
      group_(std::move(group)),
      sequence_(sequence) {
  take_record();  // profiles show the host's part; the device's is in its own
}

bool DeviceWork::is_done() const {
  TORCH_CHECK_WITH(
      DistBackendError, !captured_, label_.name(),
      ": this call was captured into a graph, and runs when that is replayed: wait for "
      "the stream of the replay instead");
  return done_->query();
}

bool DeviceWork::isCompleted() {
  if (!is_done()) return false;
  static_cast<void>(exception());
  return true;
}

std::exception_ptr DeviceWork::exception() const {
  const std::scoped_lock lock(found_mutex_);
  if (found_) return failure_;
  // First: a finished kernel has stored its error. A rank lost later does not matter.
  const bool done = !captured_ && done_->query();
  const std::optional<Error> failed = done ? group_->failure_of_calls() : group_->failure();
  found_ = done || failed;
  if (failed) failure_ = to_torch(*failed);
  return failure_;
}

void DeviceWork::rethrow_failure() const {
  if (const std::exception_ptr failure = exception()) std::rethrow_exception(failure);
}

void DeviceWork::synchronize() {
  const c10::impl::VirtualGuardImpl device(stream_.device_type());
  const c10::Stream current = device.getStream(stream_.device());
  if (current != stream_) done_->block(current);
}

bool DeviceWork::wait(milliseconds timeout) {
  if (timeout != kNoTimeout || (label_.type == c10d::OpType::BARRIER && !captured_)) {
    wait_here(bounded(timeout));
    rethrow_failure();
  } else if (group_->failure()) {
    rethrow_failure();
  }
  synchronize();
  return true;
}

void DeviceWork::wait_here(milliseconds timeout) {
  const ProfiledWait seen(label_.name());
  const Clock::time_point begin = Clock::now();
  while (!is_done()) {
    check_signals();
    TORCH_CHECK_WITH(DistBackendError, timeout == kNoTimeout || Clock::now() - begin < timeout,
                     label_.name(), ": Timed out waiting ", timeout.count(),
                     " ms for this work; the call itself goes on");
    std::this_thread::sleep_for(kLook);
  }
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  const std::scoped_lock lock(mutex_);
  if (future_) return future_;
  const c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
  future_ = c10::make_intrusive<c10::ivalue::Future>(type, std::vector{stream_.device()});
  // The future waits for the stream as it is now: the call's last step is on it.
  const c10::StreamGuard on(stream_);
  future_->markCompleted(outputs_);
  return future_;
}

}  // namespace dreamcomm

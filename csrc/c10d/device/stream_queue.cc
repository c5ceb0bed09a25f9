#include "c10d/device/stream_queue.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <thread>

#include "c10d/base/convert.h"
#include "c10d/device/contiguous.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// How long kernels may still run when a rank closes its queue alone.
constexpr milliseconds kLeaving{5'000};

}  // namespace

StreamQueue::StreamQueue(std::shared_ptr<gpu::Communicator> group, c10::Device device, Ways ways,
                         std::string about, gpu::PeerReports peer_reports,
                         std::unique_ptr<MultinodeDeviceGroup> multinode)
    : group_(std::move(group)),
      device_(device),
      ways_(std::move(ways)),
      multinode_(std::move(multinode)) {
  group_->describe_as(std::move(about), std::move(peer_reports));
}

c10::Stream StreamQueue::stream_for(const DevicePlan& plan) {
  const c10::Stream callers = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (!plan.async) return callers;
  if (!side_) side_ = ways_.make_stream();
  c10::Event before(device_.type());
  before.record(callers);
  before.block(*side_);
  return *side_;
}

c10::intrusive_ptr<DeviceWork> StreamQueue::issue(int rank, const DevicePlan& plan, Calls& calls) {
  const std::scoped_lock lock(calling_);
  const c10::DeviceGuard here(device_);
  const c10::Stream stream = stream_for(plan);
  const c10::StreamGuard on(stream);
  const bool captured = ways_.is_capturing(stream);
  // All are staged before the first is sent, as on the CPU: no part of a coalesced call sees what
  // another writes, and a tensor that cannot be staged fails the call before any part runs.
  for (Call& call : calls) call.stage();
  for (const Call& call : calls) {
    if (plan.async) call.used_on(stream, ways_.is_registered);
  }
  std::exception_ptr failure;
  try {
    run_parts(plan, calls, stream);
    for (Call& call : calls) call.unstage();
  } catch (...) {
    failure = current_as_torch();
  }
  // Also after a failure: a part may be under way.
  auto done = std::make_shared<c10::Event>(device_.type());
  done->record(stream);
  if (!captured) {  // a graph's events cannot be asked
    last_ = done;
    std::erase_if(kept_, [](const Kept& one) { return one.done->query(); });
    const bool keeps =
        plan.async && std::any_of(calls.begin(), calls.end(), [this](const Call& call) {
          return call.any_registered(ways_.is_registered);
        });
    if (keeps) kept_.push_back({done, std::move(calls)});
  }
  if (failure) std::rethrow_exception(failure);
  return c10::make_intrusive<DeviceWork>(rank, plan.label, plan.inputs, plan.outputs, stream,
                                         std::move(done), captured, group_, plan.sequence);
}

void StreamQueue::run_part(const Request& request, void* native) {
  if (multinode_) return multinode_->run(request, native);
  const Contiguous in(request.in, device_);
  const Contiguous out(request.out, device_);
  in.collect();
  Request contiguous = request;
  contiguous.in = in.blocks();
  contiguous.out = out.blocks();
  group_->run(contiguous, native);
  out.spread();
}

void StreamQueue::abort() {
  group_->abort();
  if (multinode_) multinode_->engine()->abort();
}

void StreamQueue::run_parts(const DevicePlan& plan, Calls& calls, const c10::Stream& stream) {
  void* const native = c10::impl::VirtualGuardImpl(device_.type()).getStreamNativeHandle(stream);
  bool begun = false;
  try {
    for (Call& call : calls) {
      run_part(call.request(plan.deadline, 0), native);
      begun = true;
    }
    if (multinode_) multinode_->agree(native);
  } catch (...) {
    // This rank is parts behind its peers: its next call would match one of the parts.
    if (begun || (multinode_ && multinode_->under_way())) abort();
    throw;
  }
}

bool StreamQueue::ends_within(milliseconds longest, const Interrupt& pause) const {
  const auto is_done = [this] {
    try {
      return !last_ || last_->query();
    } catch (const c10::Error&) {
      return true;  // the device is lost, and nothing runs there any more
    }
  };
  const Clock::time_point end = deadline_in(Clock::now(), longest);
  while (!is_done()) {
    if (Clock::now() > end) return false;
    pause();
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

void StreamQueue::close(const gpu::Exchange& exchange, const Interrupt& pause) {
  const std::scoped_lock lock(calling_);
  const c10::DeviceGuard here(device_);
  ends_within(milliseconds::max(), pause);
  kept_.clear();
  if (multinode_) multinode_->engine()->shutdown();
  group_->close(exchange);
}

void StreamQueue::leave(const Interrupt& pause) {
  const std::scoped_lock lock(calling_);
  const c10::DeviceGuard here(device_);
  if (!ends_within(kLeaving, pause)) abort();
  group_->drain();
}

}  // namespace dreamcomm

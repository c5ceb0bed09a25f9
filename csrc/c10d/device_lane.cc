#include "c10d/device_lane.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

#include "c10d/adjacent.h"
#include "c10d/convert.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// How long kernels may still run when a rank leaves alone.
constexpr milliseconds kLeaving{5'000};

}  // namespace

DeviceLane::DeviceLane(std::shared_ptr<gpu::Group> group, c10::Device device, bool keeps,
                       std::string about)
    : group_(std::move(group)), device_(device), keeps_(keeps) {
  group_->speak_of(std::move(about));
}

c10::Stream DeviceLane::stream_for(const DevicePlan& plan) {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const c10::Stream callers = guard.getStream(device_);
  if (!plan.async) return callers;
  if (!side_) side_ = guard.getStreamFromGlobalPool(device_, true);
  c10::Event before(device_.type());
  before.record(callers);
  before.block(*side_);
  return *side_;
}

c10::intrusive_ptr<DeviceWork> DeviceLane::issue(int rank, const DevicePlan& plan, Calls& calls) {
  const std::scoped_lock lock(calling_);
  const c10::DeviceGuard here(device_);
  const c10::Stream stream = stream_for(plan);
  const c10::StreamGuard on(stream);
  // All are staged before the first is sent, as on the CPU: no part of a coalesced call
  // sees what another writes, and a tensor that cannot be staged harms nobody.
  for (Call& call : calls) call.stage();
  bool captured = false;
  try {
    captured = run_parts(plan, calls, stream);
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
  for (Call& call : calls) call.unstage();
  if (plan.async) {
    for (const Call& call : calls) call.used_on(stream);
  }
  auto done = std::make_shared<c10::Event>(device_.type());
  done->record(stream);
  if (!captured) {  // a graph's events cannot be asked
    last_ = done;
    std::erase_if(kept_, [](const Kept& one) { return one.done->query(); });
    if (plan.async && keeps_) kept_.push_back({done, std::move(calls)});
  }
  return c10::make_intrusive<DeviceWork>(rank, plan.label, plan.inputs, plan.outputs, stream,
                                         std::move(done), group_, plan.sequence);
}

/// Says whether they were captured into a graph.
bool DeviceLane::run_parts(const DevicePlan& plan, Calls& calls, const c10::Stream& stream) {
  void* const native = c10::impl::VirtualGuardImpl(device_.type()).getStreamNativeHandle(stream);
  bool begun = false;
  bool captured = false;
  try {
    for (Call& call : calls) {
      Request request = call.request(plan.deadline, 0);
      const Adjacent in(request.in, device_);
      const Adjacent out(request.out, device_);
      in.collect();
      request.in = in.blocks();
      request.out = out.blocks();
      captured = group_->run(request, native);
      begun = true;
      out.spread();
    }
  } catch (...) {
    // This rank is parts behind its peers: its next call would meet one of them.
    if (begun) group_->abort();
    throw;
  }
  return captured;
}

bool DeviceLane::ends_within(milliseconds longest, const Interrupt& interrupt) const {
  const Clock::time_point end = deadline_in(Clock::now(), longest);
  while (last_ && !last_->query()) {
    if (Clock::now() > end) return false;
    interrupt();
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

void DeviceLane::close(const gpu::Exchange& exchange, const Interrupt& interrupt) {
  const std::scoped_lock lock(calling_);
  const c10::DeviceGuard here(device_);
  ends_within(milliseconds::max(), interrupt);
  kept_.clear();
  group_->close(exchange);
}

void DeviceLane::leave(const Interrupt& interrupt) {
  const std::scoped_lock lock(calling_);
  const c10::DeviceGuard here(device_);
  if (!ends_within(kLeaving, interrupt)) group_->abort();
  group_->drain();
}

}  // namespace dreamcomm

#include "c10d/device_calls.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>
#include <vector>

#include "c10d/adjacent.h"
#include "c10d/convert.h"
#include "gpu/computes.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// Ranks that close a group together do so within this time, or the memory stays.
constexpr milliseconds kClosing{5'000};

}  // namespace

DeviceCalls::DeviceCalls(std::shared_ptr<Communicator> comm, DeviceKind kind, Interrupt interrupt,
                         milliseconds meeting_time)
    : comm_(std::move(comm)),
      kind_(std::move(kind)),
      interrupt_(std::move(interrupt)),
      meeting_time_(meeting_time) {}

/// All ranks' bytes, over the memory that the processes share.
gpu::Exchange DeviceCalls::exchange(milliseconds longest) const {
  return [this, longest](std::span<const std::byte> mine, std::span<std::byte> all) {
    const Block in{const_cast<std::byte*>(mine.data()), mine.size()};
    std::vector<Block> out;
    for (int rank = 0; rank < comm_->size(); ++rank) {
      out.push_back({all.data() + static_cast<std::size_t>(rank) * mine.size(), mine.size()});
    }
    Request request;
    request.kind = Kind::kAllGather;
    request.in = std::span(&in, 1);
    request.out = out;
    request.deadline = deadline_in(Clock::now(), longest);
    comm_->run(request, interrupt_);
  };
}

std::shared_ptr<gpu::Group> DeviceCalls::group() const {
  const std::scoped_lock lock(mutex_);
  return group_;
}

std::shared_ptr<DeviceHeap> DeviceCalls::heap() const {
  const std::scoped_lock lock(mutex_);
  return heap_;
}

bool DeviceCalls::serves(const at::Tensor& tensor, const std::optional<Reduction>& reduction) {
  if (tensor.device().type() != kind_.type || tensor.layout() != at::kStrided) return false;
  if (reduction && !gpu::computed_as(*reduction)) return false;
  return serves(tensor.device());
}

bool DeviceCalls::serves(c10::Device device) {
  const std::scoped_lock lock(calling_);
  if (!device_) return meet_on(device);
  TORCH_CHECK_VALUE(*device_ == device, "rank ", comm_->rank(), ": this group's calls are on ",
                    *device_, ", that of its first tensor, got a tensor on ", device,
                    "; make a group for each device");
  return group() != nullptr;
}

bool DeviceCalls::meet_on(c10::Device device) {
  const c10::DeviceGuard here(device);
  try {
    gpu::Meeting meeting = gpu::meet(comm_->rank(), comm_->size(), kind_.make_driver, kind_.options,
                                     exchange(meeting_time_));
    const std::scoped_lock lock(mutex_);
    group_ = std::move(meeting.group);
    if (group_ && group_->heap()) {
      heap_ = std::make_shared<DeviceHeap>(group_->heap(), kind_.options.heap_bytes, device);
    }
    why_not_ = std::move(meeting.why_not);
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
  device_ = device;
  return group() != nullptr;
}

at::Tensor DeviceCalls::allocate(std::int64_t size, const at::TensorOptions& options) {
  const c10::Device given = options.device();
  const c10::impl::VirtualGuardImpl guard(kind_.type);
  const c10::Device device = given.has_index() ? given : guard.getDevice();
  at::Tensor made;
  if (allocates() && serves(device) && !group()->failure()) made = heap()->allocate(size, options);
  return made.defined() ? made : at::empty({size}, options.device(device));
}

bool DeviceCalls::holds(const at::Tensor& tensor) const {
  const std::shared_ptr<DeviceHeap> heap = this->heap();
  return heap && tensor.device().type() == kind_.type && tensor.layout() == at::kStrided &&
         tensor.numel() > 0 && heap->holds(tensor);
}

c10::Stream DeviceCalls::stream_for(const Plan& plan) {
  const c10::impl::VirtualGuardImpl device(kind_.type);
  const c10::Stream callers = device.getStream(*device_);
  if (!plan.async) return callers;
  if (!side_) side_ = device.getStreamFromGlobalPool(*device_, true);
  c10::Event before(kind_.type);
  before.record(callers);
  before.block(*side_);
  return *side_;
}

c10::intrusive_ptr<DeviceWork> DeviceCalls::issue(int rank, const Plan& plan, Calls& calls) {
  const std::scoped_lock lock(calling_);
  const c10::DeviceGuard here(*device_);
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
  auto done = std::make_shared<c10::Event>(kind_.type);
  done->record(stream);
  if (!captured) last_ = done;  // a graph's events cannot be asked
  if (plan.async && !captured) keep_until(done, calls);
  return c10::make_intrusive<DeviceWork>(rank, plan.label, plan.inputs, plan.outputs, stream,
                                         std::move(done), group(), plan.sequence);
}

bool DeviceCalls::run_parts(const Plan& plan, Calls& calls, const c10::Stream& stream) {
  void* const native = c10::impl::VirtualGuardImpl(kind_.type).getStreamNativeHandle(stream);
  const std::shared_ptr<gpu::Group> met = group();
  bool begun = false;
  bool captured = false;
  try {
    for (Call& call : calls) {
      Request request = call.request(plan.deadline, 0);
      const Adjacent in(request.in, *device_);
      const Adjacent out(request.out, *device_);
      in.collect();
      request.in = in.blocks();
      request.out = out.blocks();
      captured = met->run(request, native);
      begun = true;
      out.spread();
    }
  } catch (...) {
    // This rank is parts behind its peers: its next call would meet one of them.
    if (begun) met->abort();
    throw;
  }
  return captured;
}

void DeviceCalls::keep_until(std::shared_ptr<const c10::Event> done, Calls& calls) {
  std::erase_if(kept_, [](const Kept& one) { return one.done->query(); });
  if (heap()) kept_.push_back({std::move(done), std::move(calls)});
}

std::optional<Error> DeviceCalls::failure() const {
  const std::shared_ptr<gpu::Group> met = group();
  return met ? met->failure() : std::nullopt;
}

void DeviceCalls::abort() {
  if (const std::shared_ptr<gpu::Group> met = group()) met->abort();
}

bool DeviceCalls::ends_within(milliseconds longest) const {
  const Clock::time_point end = deadline_in(Clock::now(), longest);
  while (last_ && !last_->query()) {
    if (Clock::now() > end) return false;
    interrupt_();
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

void DeviceCalls::close(bool together) {
  const std::scoped_lock lock(calling_);
  const std::shared_ptr<gpu::Group> met = group();
  if (!met) return;
  const c10::DeviceGuard here(*device_);
  try {
    if (together) {
      ends_within(milliseconds::max());
      kept_.clear();
      met->close(exchange(kClosing));
      return;
    }
    if (!ends_within(kClosing)) met->abort();
    met->drain();
  } catch (const Error& error) {
    // Ranks that are gone cannot agree: the memory stays until the process ends.
    if (!comm_->failure())
      TORCH_WARN("dreamcomm: a group's memory on ", *device_,
                 " is kept until the process ends: ", error.what());
  }
}

std::string DeviceCalls::describe() const {
  const std::scoped_lock lock(mutex_);
  if (!group_) return why_not_;
  return concat(group_->describe(), heap_ ? concat("; ", heap_->describe()) : "");
}

}  // namespace dreamcomm

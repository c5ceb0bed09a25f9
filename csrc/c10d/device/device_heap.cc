#include "c10d/device/device_heap.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <functional>

#include "c10d/process/process_heap.h"
#include "core/error.h"

namespace dreamcomm {

DeviceHeap::DeviceHeap(std::shared_ptr<std::byte> memory, std::size_t bytes, c10::Device device,
                       IsCapturing is_capturing)
    : memory_(std::move(memory)),
      bytes_(bytes),
      device_(device),
      is_capturing_(std::move(is_capturing)),
      free_(bytes) {}

at::Tensor DeviceHeap::allocate(std::int64_t size, const at::TensorOptions& options) {
  const std::uint64_t wanted = bytes_of(size, options);
  const c10::Stream maker = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (is_capturing_(maker)) return {};
  const std::lock_guard lock(mutex_);
  sweep();
  const bool fits = wanted <= bytes_;
  const std::size_t bytes =
      (std::max<std::size_t>(fits ? wanted : 0, 1) + kAlign - 1) / kAlign * kAlign;
  const std::optional<std::size_t> offset = fits ? free_.take(bytes) : std::nullopt;
  if (!offset) {
    ++refused_;
    return {};
  }
  in_use_ += bytes;
  auto give = [heap = shared_from_this(), at = *offset, bytes, maker](void*) {
    heap->drop(at, bytes, maker);
  };
  const std::array shape{size};  // read when the tensor is made
  at::TensorMaker made = at::for_blob(memory_.get() + *offset, shape);
  made.deleter(std::move(give)).options(options.device(device_)).target_device(device_);
  // Storages that are resized point to their allocator as long as they live, which may be longer
  // than this heap: torch's own is there to the end.
  if (device_.is_cuda()) made.allocator(c10::GetAllocator(device_.type())).resizeable_storage();
  return made.make_tensor();
}

// Runs where the last reference goes, so it must not throw.
void DeviceHeap::drop(std::size_t offset, std::size_t bytes, const c10::Stream& maker) {
  Dropped dropped{offset, bytes, {}};
  try {
    const c10::Stream here = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    for (const c10::Stream& stream : {maker, here}) {
      if (!dropped.users.empty() && here == maker) break;
      if (is_capturing_(stream)) return;
      auto event = std::make_shared<c10::Event>(device_.type());
      event->record(stream);
      dropped.users.push_back(std::move(event));
    }
  } catch (const std::exception&) {
    return;  // the device is gone
  }
  const std::lock_guard lock(mutex_);
  in_use_ -= bytes;
  dropped_.push_back(std::move(dropped));
}

/// Takes back memory that no stream uses any more. Memory whose streams cannot be asked stays.
void DeviceHeap::sweep() {
  const auto is_unused = [](const Dropped& one) {
    try {
      return std::all_of(one.users.begin(), one.users.end(),
                         [](const auto& user) { return user->query(); });
    } catch (const std::exception&) {
      return false;
    }
  };
  const auto unused = std::stable_partition(dropped_.begin(), dropped_.end(),
                                            [&](const Dropped& one) { return !is_unused(one); });
  for (auto one = unused; one != dropped_.end(); ++one) free_.give_back(one->offset, one->bytes);
  dropped_.erase(unused, dropped_.end());
}

bool DeviceHeap::holds(const void* address) const {
  const auto* at = static_cast<const std::byte*>(address);
  const std::less_equal<const std::byte*> before;
  return before(memory_.get(), at) && !before(memory_.get() + bytes_, at);
}

std::string DeviceHeap::describe() const {
  const std::lock_guard lock(mutex_);
  constexpr int kMiB = 20;
  const std::string full =
      refused_ == 0 ? "" : concat(", ", refused_, " requests found it full and got other memory");
  return concat(in_use_ >> kMiB, " of ", bytes_ >> kMiB, " MiB of registered memory in use", full);
}

}  // namespace dreamcomm

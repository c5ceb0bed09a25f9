// The device that tensors are on, by c10 alone: nothing of libtorch_cuda is linked, and
// one source serves builds of torch with and without CUDA.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace dreamcomm {

/// While it lives, the device is the current one.
class CurrentDevice {
 public:
  explicit CurrentDevice(c10::Device device) : watchdog_(device), device_(device) {}

  /// The caller's current stream, as the device's own runtime calls it (a cudaStream_t).
  void* stream() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle();
  }

 private:
  c10::DeviceGuard watchdog_;
  c10::Device device_;
};

}  // namespace dreamcomm

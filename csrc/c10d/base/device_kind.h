// The accelerator whose tensors this library's own kernels serve.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "gpu/cuda/driver.h"
#include "gpu/host/communicator.h"

namespace dreamcomm {

/// Bytes of a large tensor that go between nodes at a time.
inline constexpr std::size_t kDeviceChunkBytes = std::size_t{16} << 20;

/// The accelerator, and how to make its driver for the current device.
struct DeviceKind {
  c10::DeviceType type = c10::DeviceType::CUDA;
  std::function<std::unique_ptr<gpu::Driver>()> make_driver = gpu::make_cuda_driver;
  /// True if a stream, given by its native handle, is being captured into a graph.
  std::function<bool(void* stream)> is_capturing = gpu::is_capturing;
  gpu::CommunicatorOptions options;
  std::size_t chunk = kDeviceChunkBytes;
};

}  // namespace dreamcomm

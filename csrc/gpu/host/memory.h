// Owners of a device's memory and streams. Includes no CUDA header.
#pragma once

#include <cstddef>
#include <span>

namespace dreamcomm::gpu {

/// Zeroed memory of the current device, at least `bytes`, by plain cudaMalloc, so that other
/// processes can open it by its base. Throws Error(kSystem) with CUDA's text.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

/// Zeroed memory of the host that kernels read and write under the same address.
class MappedMemory {
 public:
  explicit MappedMemory(std::size_t bytes);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

/// A stream that does not wait for other streams.
class OwnStream {
 public:
  OwnStream();
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  void* get() const { return stream_; }
  /// Copies in the order of the stream; `from` may be reused when it returns.
  void copy(void* to, const void* from, std::size_t bytes) const;
  void wait() const;

 private:
  void* stream_ = nullptr;
};

}  // namespace dreamcomm::gpu

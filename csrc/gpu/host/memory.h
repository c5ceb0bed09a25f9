// Memory and streams of a device, owned. No CUDA header is seen here.
#pragma once

#include <cstddef>
#include <span>

namespace dreamcomm::gpu {

/// Memory of the current device, zeroed, at least as many bytes: plain cudaMalloc, which
/// other processes can be given by its base. Throws Error(kSystem) with CUDA's words.
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

/// Memory of the host that kernels read and write, zeroed: one address for both.
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

/// A stream that waits for no other.
class OwnStream {
 public:
  OwnStream();
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  void* get() const { return stream_; }
  /// In the order of the stream; `from` may be used again when it returns.
  void copy(void* to, const void* from, std::size_t bytes) const;
  void wait() const;

 private:
  void* stream_ = nullptr;
};

}  // namespace dreamcomm::gpu

// Anonymous shared memory: a memfd and its mapping.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "core/error.h"
#include "transport/os/unix_socket.h"

namespace dreamcomm {

/// The system gives no shared memory, or not enough: the group can run without it. A lack of
/// descriptors is a plain Error(kSystem): little works then.
class NoSharedMemory final : public Error {
 public:
  explicit NoSharedMemory(const std::string& what) : Error(ErrorKind::kSystem, what) {}
};

struct MappingOptions {
  bool writable = true;
  bool in_children = false;  // a forked child sees the mapping
};

/// A shared mapping, unmapped with the object.
class Mapping {
 public:
  Mapping() = default;
  /// Maps all `bytes` of the descriptor. Throws NoSharedMemory, or Error(kSystem).
  Mapping(const Fd& fd, std::size_t bytes, const MappingOptions& options = {});
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// From now on writes to it succeed, or fault. Throws Error(kSystem).
  void allow_writes(bool allowed) const;

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// The label of a rank's window; tools find it by this.
inline constexpr const char* kWindowLabel = "dreamcomm-window";

/// New zeroed memory of fixed size: sealed, so that no holder of the descriptor
/// can shrink it under the others. `label` shows in /proc/PID/maps. Throws NoSharedMemory, or
/// Error(kSystem).
Fd create_memfd(const char* label, std::size_t bytes);

/// True if the descriptor is such a memfd, of exactly `bytes`, that can be written.
bool is_sealed_memfd(const Fd& fd, std::size_t bytes);

}  // namespace dreamcomm

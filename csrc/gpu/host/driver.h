// The interface to a rank's device: CUDA (cuda/driver.h), or, for tests, threads of the process.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpu/collectives/kernel_args.h"
#include "gpu/host/launch.h"

namespace dreamcomm::gpu {

using Id = std::array<std::uint8_t, 16>;

/// Names a device's memory to peers.
struct MemoryName {
  Id process{};                     // the process that allocated it
  std::uint64_t address = 0;        // in that process
  std::array<std::byte, 64> ipc{};  // for other processes
};

/// One rank's device, as the group uses it. Every call that is not noexcept may throw
/// Error(kSystem) with the system's own text. Not thread-safe.
class Driver {
 public:
  Driver() = default;
  virtual ~Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  virtual Id process() const = 0;
  /// Identifies the hardware; equal for ranks that share a device.
  virtual Id device() const = 0;
  /// The device as a text for users.
  virtual std::string describe() const = 0;
  /// Blocks of any kernel that the device runs at the same time.
  virtual int resident_blocks() const = 0;

  /// Zeroed memory of the device that can be named to peers.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void release(std::byte* memory) noexcept = 0;
  virtual MemoryName name_of(std::byte* memory) = 0;
  /// Maps a peer's memory; returns its address for this rank's kernels. close() it before its owner
  /// releases it.
  virtual std::byte* open(const MemoryName& name) = 0;
  virtual void close(std::byte* opened) noexcept = 0;

  /// Zeroed memory of the host that kernels read and write under the same address.
  virtual std::byte* allocate_host(std::size_t bytes) = 0;
  virtual void release_host(std::byte* memory) noexcept = 0;

  /// The driver's own stream, for the group's internal calls.
  virtual void* stream() const = 0;
  /// Copies between the host and devices; waits for the copy, not for kernels.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;

  /// Starts a call's kernel in the order of a stream, after all kernels that were started before on
  /// any stream, because a group's kernels must not overlap on a rank. Kernels that are captured
  /// into a graph are ordered only within one capture; the caller has to order replays.
  virtual void start(const KernelArgs& args, const Grid& grid, void* stream) = 0;
  /// Copies between the host's mapped memory and the device's, ordered like a kernel: start().
  virtual void copy_later(void* to, const void* from, std::size_t bytes, void* stream) = 0;
  /// Waits until all started kernels have ended. That takes limited time, because their waits are
  /// bounded.
  virtual void drain() = 0;

  /// Holds `what` as long as the driver lives. A driver that holds itself lives as long as the
  /// process.
  void keep(std::shared_ptr<void> what) { kept_.push_back(std::move(what)); }

 private:
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace dreamcomm::gpu

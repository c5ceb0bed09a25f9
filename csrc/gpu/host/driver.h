// What a group needs of the machine its devices belong to: CUDA (cuda/driver.h), or, for
// tests, threads of the process.
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

/// Tells a peer where memory of a device is.
struct MemoryName {
  Id process{};                     // that allocated it
  std::uint64_t address = 0;        // in that process
  std::array<std::byte, 64> ipc{};  // for other processes
};

/// One rank's device, as the group uses it. Every call may throw Error(kSystem) with the
/// system's own words, unless it is noexcept. Not thread-safe.
class Driver {
 public:
  Driver() = default;
  virtual ~Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  virtual Id process() const = 0;
  /// Of the piece of hardware: equal for ranks that share one.
  virtual Id device() const = 0;
  /// For people.
  virtual std::string describe() const = 0;
  /// Blocks of any kernel that the device runs at the same time.
  virtual int room() const = 0;

  /// Zeroed memory of the device that can be named to peers.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void release(std::byte* memory) noexcept = 0;
  virtual MemoryName name_of(std::byte* memory) = 0;
  /// A peer's memory, as this rank's kernels address it. close() it before its owner
  /// releases it.
  virtual std::byte* open(const MemoryName& name) = 0;
  virtual void close(std::byte* opened) noexcept = 0;

  /// Zeroed memory of the host that kernels read and write under the same address.
  virtual std::byte* allocate_host(std::size_t bytes) = 0;
  virtual void release_host(std::byte* memory) noexcept = 0;

  /// A stream of the driver's own, for calls of nobody's.
  virtual void* stream() const = 0;
  /// Between the host and devices; waits until it is done, for no kernel.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;

  /// Starts a call's kernel in the order of a stream, after all that were started before
  /// on any: a group's kernels must not overlap on a rank. Of kernels that are captured into
  /// a graph that holds for those of one capture; replays are for the caller to order.
  virtual void start(const KernelArgs& args, const Grid& grid, void* stream) = 0;
  /// Between the host's mapped memory and the device's, as if it were a kernel: start().
  virtual void copy_later(void* to, const void* from, std::size_t bytes, void* stream) = 0;
  /// Waits until all started kernels have ended. They do: their waits are bounded.
  virtual void drain() = 0;

  /// Holds it as long as the driver lives; the driver itself: for the life of the process.
  void keep(std::shared_ptr<void> what) { kept_.push_back(std::move(what)); }

 private:
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace dreamcomm::gpu

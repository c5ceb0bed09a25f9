// The arguments of a kernel: one call, passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"
#include "gpu/collectives/device.h"
#include "gpu/collectives/window.h"

namespace dreamcomm::gpu {

/// Trivially copyable. Addresses are those of the GPU that runs the kernel.
struct KernelArgs {
  CallInfo info;
  int rank = 0;
  int size = 1;
  int divisor = 1;             // for AVG
  std::uint64_t sequence = 0;  // the call's number; for reports

  /// Bytes of a block (request.h), and where this rank's blocks begin. Kinds with a block for each
  /// rank have block i `bytes` after block i - 1.
  std::size_t bytes = 0;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  /// all_to_all: bytes of each block; the blocks are contiguous.
  std::uint64_t in_bytes[kMaxRanks] = {};
  std::uint64_t out_bytes[kMaxRanks] = {};

  /// Registered memory, which all ranks map: that of each rank as mapped here, and the offsets of
  /// this rank's tensors in its own, plus 1; 0: the tensor is not in it.
  std::byte* heaps[kMaxRanks] = {};
  std::uint64_t in_place = 0;
  std::uint64_t out_place = 0;

  std::byte* windows[kMaxRanks] = {};  // of all ranks, as mapped here
  Layout layout;
  std::uint64_t* rounds = nullptr;  // the last round that each of this rank's blocks published
  Control* control = nullptr;       // in memory of the host
  Report* report = nullptr;         // in memory of the host
  std::int64_t patience_ns = 0;     // the longest wait
};

}  // namespace dreamcomm::gpu

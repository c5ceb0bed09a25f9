// A group's driver for tests: memory of the process as that of a device, threads as lanes.
#pragma once

#include <memory>

#include "gpu/host/driver.h"

namespace dreamcomm::testing {

/// Faults of a rank's device.
struct Faults {
  bool allocates = true;  // else every allocation is refused
  bool opens = true;      // else peers' memory cannot be opened
  bool reaches = true;    // else it is opened, but writes do not arrive
  bool reads = true;      // else kernels gather other words than the peers gave
  int drains = -1;        // times that its kernels are waited for before it is lost; -1: never
};

/// A device that all drivers of the same number share. It runs `room` blocks at the same time.
/// `start` returns when the kernel has ended.
std::unique_ptr<gpu::Driver> make_host_driver(int device, int room, Faults faults = {});

/// Pieces of memory that host drivers have given out and not taken back.
int host_memory_in_use();

/// Calls of host drivers so far on tensors in registered memory.
int host_calls_in_place();

/// Kernels that host drivers have begun so far. await_host_kernel() waits, for a minute at most,
/// until there are more than `begun`.
int host_kernels_begun();
void await_host_kernel(int begun);

}  // namespace dreamcomm::testing

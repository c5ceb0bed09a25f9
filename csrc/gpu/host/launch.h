// Starts kernels. No CUDA header is seen here: without nvcc a stand-in is compiled.
#pragma once

#include <span>
#include <string>

#include "gpu/collectives/kernel_args.h"

namespace dreamcomm::gpu {

/// Whether kernels were compiled in.
bool is_built();

/// Of the CUDA runtime that is linked, as 13000 for 13.0; 0: none.
int runtime_version();

/// Devices that this process may use. None, with the reason in `why`, where there is no
/// driver, or it is too old; does not make a context.
int device_count(std::string& why);

/// Whether what a stream (a cudaStream_t) is given goes into a graph, and does not run.
bool is_capturing(void* stream);

/// Blocks of `lanes` threads.
struct Grid {
  int blocks = 1;
  int lanes = 512;
};

/// Most lanes that a block has.
int most_lanes();

/// Loads all kernels into the current device. CUDA loads each at its first launch else,
/// and may wait for the kernels that run to end: for ever, if those wait for this one.
/// Once for each device, before anything is launched there.
void load_kernels();

/// Starts the kernel of one rank's call on a stream (a cudaStream_t) of the current
/// device, and returns. All blocks of all ranks that share the device wait for each other: that
/// they run at the same time is for the caller to see to, once (Driver::room()). Throws
/// Error(kInvalid) for types and operations that GPUs do not compute with here; Error(kSystem) with
/// CUDA's words for what CUDA refuses.
void launch(const KernelArgs& args, Grid grid, void* stream);

/// Starts one kernel for the calls of several ranks on one device; `tasks` is memory of
/// the device, `calls` the same on the host. All blocks of all ranks run at the same time,
/// or it throws Error(kInvalid): they wait for each other.
void launch_ranks(std::span<const KernelArgs> calls, const KernelArgs* tasks, Grid grid,
                  void* stream);

}  // namespace dreamcomm::gpu

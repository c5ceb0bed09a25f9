// Starts kernels. Includes no CUDA header: without nvcc a stub is compiled instead.
#pragma once

#include <span>
#include <string>

#include "gpu/collectives/kernel_args.h"

namespace dreamcomm::gpu {

/// True if kernels were compiled in.
bool is_built();

/// Version of the CUDA runtime that is linked, as 13000 for 13.0; 0: none.
int runtime_version();

/// The number of devices that this process may use. It is 0, with the reason in `why`, if there is
/// no driver or it is too old. Does not make a context.
int device_count(std::string& why);

/// True if a stream (a cudaStream_t) captures work into a graph instead of running it.
bool is_capturing(void* stream);

/// Blocks of `lanes` threads.
struct Grid {
  int blocks = 1;
  int lanes = 512;
};

/// The largest number of lanes in a block.
int most_lanes();

/// Loads all kernels into the current device. Otherwise CUDA loads each at its first launch, and
/// may wait for running kernels to end: for ever, if those wait for this one. Call it once for
/// each device, before anything is launched there.
void load_kernels();

/// Starts the kernel of one rank's call on a stream (a cudaStream_t) of the current device, and
/// returns. All blocks of all ranks that share the device wait for each other, so the caller has to
/// check once that they run at the same time (Driver::resident_blocks()). Throws Error(kInvalid)
/// for types and operations that GPUs do not compute with here, and Error(kSystem) with CUDA's text
/// for what CUDA refuses.
void launch(const KernelArgs& args, Grid grid, void* stream);

/// Starts one kernel for the calls of several ranks on one device. `rank_args` is a copy of `calls`
/// in memory of the device. All blocks of all ranks have to run at the same time, because they wait
/// for each other. Throws Error(kInvalid) if they do not fit.
void launch_ranks(std::span<const KernelArgs> calls, const KernelArgs* rank_args, Grid grid,
                  void* stream);

}  // namespace dreamcomm::gpu

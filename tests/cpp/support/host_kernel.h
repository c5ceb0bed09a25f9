// Runs the GPU's kernels on threads of the process.
#pragma once

#include <cstddef>

#include "gpu/collectives/kernel_args.h"

namespace dreamcomm::testing {

/// Runs each lane as a thread. Returns the bytes that the kernel read and wrote. `delays`: per
/// mille of lanes that begin late. Throws if GPUs do not compute with the call's type.
std::size_t run_kernel(const gpu::KernelArgs& args, int blocks, int lanes, int delays);

}  // namespace dreamcomm::testing

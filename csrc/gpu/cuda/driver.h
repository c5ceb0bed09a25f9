// CUDA as a group's driver: memory by cudaMalloc, known to other processes by cudaIpc, and
// to other ranks of this process by its address. No CUDA header is seen here.
#pragma once

#include <memory>

#include "gpu/host/driver.h"

namespace dreamcomm::gpu {

/// For the device that is the current one now. Initialises CUDA.
/// Throws Error(kSystem) with CUDA's words, Error(kInvalid) in a build without CUDA.
std::unique_ptr<Driver> make_cuda_driver();

}  // namespace dreamcomm::gpu

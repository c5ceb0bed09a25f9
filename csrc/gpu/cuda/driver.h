// CUDA as a group's driver. Memory is allocated by cudaMalloc; other processes open it by cudaIpc,
// and other ranks of this process by its address. Includes no CUDA header.
#pragma once

#include <memory>

#include "gpu/host/driver.h"

namespace dreamcomm::gpu {

/// Makes a driver for the current device. Initialises CUDA.
/// Throws Error(kSystem) with CUDA's text, Error(kInvalid) in a build without CUDA.
std::unique_ptr<Driver> make_cuda_driver();

}  // namespace dreamcomm::gpu

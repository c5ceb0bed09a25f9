// Converts CUDA's errors into Error.
#pragma once

#include <cuda_runtime_api.h>

#include "core/error.h"

namespace dreamcomm::gpu {

/// Throws Error(kSystem) unless the call succeeded. Clears the error.
inline void check_cuda(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  cudaGetLastError();
  throw Error(ErrorKind::kSystem, concat(call, ": CUDA said ", cudaGetErrorName(result), " (",
                                         cudaGetErrorString(result), ')'));
}

}  // namespace dreamcomm::gpu

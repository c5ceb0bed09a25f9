// The kernels: bodies on CUDA threads.
#pragma once

#include "gpu/collectives/dispatch.h"
#include "gpu/cuda/target.cuh"

namespace dreamcomm::gpu {

inline constexpr int kLanes = 512;  // of a block, at the most

/// The call of one rank; or, with a grid of several rows, those of several ranks that
/// share the device: row y has tasks[y].
template <typename F>
__global__ void __launch_bounds__(kLanes, 1)
    reduce_kernel(const __grid_constant__ KernelArgs args, const KernelArgs* tasks) {
  const CudaTarget target;
  Block<CudaTarget> block(target, gridDim.y == 1 ? args : tasks[blockIdx.y]);
  reduce_body<F>(block);
}

/// For cudaLaunchKernel.
using Kernel = const void*;

template <typename F>
Kernel reduce_kernel_of() {
  return reinterpret_cast<Kernel>(&reduce_kernel<F>);
}

// Each in a file of its own, compiled side by side. Null for types of other files.
Kernel move_kernel_of();
Kernel float_kernels(DType type);
Kernel half_kernels(DType type);
Kernel integer_kernels(DType type);

}  // namespace dreamcomm::gpu

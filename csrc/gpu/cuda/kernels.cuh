// The kernels: bodies on CUDA threads.
#pragma once

#include "gpu/collectives/dispatch.h"
#include "gpu/cuda/target.cuh"

namespace dreamcomm::gpu {

inline constexpr int kLanes = 512;  // most lanes of a block

/// Carries out the call of one rank. A grid with several rows carries out those of several ranks
/// that share the device: row y has rank_args[y].
template <typename F>
__global__ void __launch_bounds__(kLanes, 1)
    reduce_kernel(const __grid_constant__ KernelArgs args, const KernelArgs* rank_args) {
  const CudaTarget target;
  Block<CudaTarget> block(target, gridDim.y == 1 ? args : rank_args[blockIdx.y]);
  reduce_body<F>(block);
}

/// A kernel as cudaLaunchKernel takes it.
using Kernel = const void*;

template <typename F>
Kernel reduce_kernel_of() {
  return reinterpret_cast<Kernel>(&reduce_kernel<F>);
}

// Each is in its own file, so that they compile in parallel. Null for types of other files.
Kernel move_kernel_of();
Kernel float_kernels(DType type);
Kernel half_kernels(DType type);
Kernel integer_kernels(DType type);

}  // namespace dreamcomm::gpu

#include "gpu/cuda/kernels.cuh"

namespace dreamcomm::gpu {
namespace {

__global__ void __launch_bounds__(kLanes, 1)
    move_kernel(const __grid_constant__ KernelArgs args, const KernelArgs* rank_args) {
  const CudaTarget target;
  Block<CudaTarget> block(target, gridDim.y == 1 ? args : rank_args[blockIdx.y]);
  move_body(block);
}

}  // namespace

Kernel move_kernel_of() { return reinterpret_cast<Kernel>(&move_kernel); }

}  // namespace dreamcomm::gpu

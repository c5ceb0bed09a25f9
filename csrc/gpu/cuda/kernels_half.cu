#include "gpu/cuda/kernels.cuh"

namespace dreamcomm::gpu {

Kernel half_kernels(DType type) {
  switch (type) {
    case DType::kFloat16:
      return reduce_kernel_of<Float16>();
    case DType::kBFloat16:
      return reduce_kernel_of<BFloat16>();
    default:
      return nullptr;
  }
}

}  // namespace dreamcomm::gpu

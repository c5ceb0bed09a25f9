#include "gpu/cuda/kernels.cuh"

namespace dreamcomm::gpu {

Kernel float_kernels(DType type) {
  switch (type) {
    case DType::kFloat32:
      return reduce_kernel_of<kernels::Real<float>>();
    case DType::kFloat64:
      return reduce_kernel_of<kernels::Real<double>>();
    default:
      return nullptr;
  }
}

}  // namespace dreamcomm::gpu

#include "gpu/cuda/kernels.cuh"

namespace dreamcomm::gpu {

Kernel integer_kernels(DType type) {
  switch (type) {
    case DType::kUInt8:
      return reduce_kernel_of<kernels::Integer<std::uint8_t>>();
    case DType::kInt8:
      return reduce_kernel_of<kernels::Integer<std::int8_t>>();
    case DType::kInt16:
      return reduce_kernel_of<kernels::Integer<std::int16_t>>();
    case DType::kInt32:
      return reduce_kernel_of<kernels::Integer<std::int32_t>>();
    case DType::kInt64:
      return reduce_kernel_of<kernels::Integer<std::int64_t>>();
    default:
      return nullptr;
  }
}

}  // namespace dreamcomm::gpu

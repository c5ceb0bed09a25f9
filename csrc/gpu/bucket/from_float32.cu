#include "gpu/bucket/kernels.cuh"

namespace dreamcomm::gpu {

BucketKernel bucket_kernel_from_float32(bool packs, DType to) {
  return bucket_kernel_from<kernels::Real<float>>(packs, to);
}

}  // namespace dreamcomm::gpu

#include "gpu/bucket/kernels.cuh"

namespace dreamcomm::gpu {

BucketKernel bucket_kernel_from_float64(bool packs, DType to) {
  return bucket_kernel_from<kernels::Real<double>>(packs, to);
}

}  // namespace dreamcomm::gpu

#include "gpu/bucket/kernels.cuh"

namespace dreamcomm::gpu {

BucketKernel bucket_kernel_from_float16(bool packs, DType to) {
  return bucket_kernel_from<Float16>(packs, to);
}

}  // namespace dreamcomm::gpu

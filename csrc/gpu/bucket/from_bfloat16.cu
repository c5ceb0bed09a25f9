#include "gpu/bucket/kernels.cuh"

namespace dreamcomm::gpu {

BucketKernel bucket_kernel_from_bfloat16(bool packs, DType to) {
  return bucket_kernel_from<BFloat16>(packs, to);
}

}  // namespace dreamcomm::gpu

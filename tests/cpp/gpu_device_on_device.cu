#include "gpu/cuda/check.cuh"
#include "gpu_device.h"

namespace dreamcomm::testing {

void use_device(int device) { gpu::check_cuda(cudaSetDevice(device), "cudaSetDevice"); }

}  // namespace dreamcomm::testing

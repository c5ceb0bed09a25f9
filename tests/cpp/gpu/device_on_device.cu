#include "cpp/gpu/device.h"
#include "gpu/cuda/check.cuh"

namespace dreamcomm::testing {

void use_device(int device) { gpu::check_cuda(cudaSetDevice(device), "cudaSetDevice"); }

}  // namespace dreamcomm::testing

// Replaces driver.cu in builds without CUDA.
#include "core/error.h"
#include "gpu/cuda/driver.h"

namespace dreamcomm::gpu {

std::unique_ptr<Driver> make_cuda_driver() {
  throw Error(
      ErrorKind::kInvalid,
      "dreamcomm was built without CUDA: " DREAMCOMM_WITHOUT_CUDA
      ". Install it again with nvcc on PATH and DREAMCOMM_BUILD_CUDA=on in the environment");
}

}  // namespace dreamcomm::gpu

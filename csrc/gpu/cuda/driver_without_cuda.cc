// Stands in for driver.cu where there is no nvcc.
#include "core/error.h"
#include "gpu/cuda/driver.h"

namespace dreamcomm::gpu {

std::unique_ptr<Driver> make_cuda_driver() {
  throw Error(ErrorKind::kInvalid, "dreamcomm was built without CUDA, as nvcc was not found");
}

}  // namespace dreamcomm::gpu

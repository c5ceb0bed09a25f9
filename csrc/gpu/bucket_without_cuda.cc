// Stands in for bucket_launch.cu where there is no nvcc.
#include "core/error.h"
#include "gpu/bucket_launch.h"

namespace dreamcomm::gpu {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorKind::kInvalid,
              "this build of dreamcomm has no CUDA kernels: it was built without nvcc. Install the "
              "CUDA toolkit (nvcc on PATH) and build again");
}

}  // namespace

Moved pack(const PackJob&, void*) { refuse(); }
Moved unpack(const UnpackJob&, const Inspection&, void*) { refuse(); }

}  // namespace dreamcomm::gpu

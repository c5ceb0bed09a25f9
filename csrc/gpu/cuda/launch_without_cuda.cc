// Replaces launch.cu and bucket/launch.cu in builds without CUDA. The build defines
// DREAMCOMM_WITHOUT_CUDA, the reason.
#include "core/error.h"
#include "gpu/bucket/launch.h"
#include "gpu/host/launch.h"

namespace dreamcomm::gpu {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorKind::kInvalid,
              "this build of dreamcomm has no CUDA kernels: " DREAMCOMM_WITHOUT_CUDA
              ". Install dreamcomm again with nvcc on PATH and DREAMCOMM_BUILD_CUDA=on in the "
              "environment");
}

}  // namespace

bool is_built() { return false; }
int runtime_version() { return 0; }
int device_count(std::string& why) {
  why = "dreamcomm was built without CUDA: " DREAMCOMM_WITHOUT_CUDA;
  return 0;
}
int most_lanes() { return 0; }
bool is_capturing(void*) { return false; }
void load_kernels() { refuse(); }
void launch(const KernelArgs&, Grid, void*) { refuse(); }
void launch_ranks(std::span<const KernelArgs>, const KernelArgs*, Grid, void*) { refuse(); }
Moved pack(const PackJob&, void*, const Stage&) { refuse(); }
Moved unpack(const UnpackJob&, const Inspection&, void*, const Stage&) { refuse(); }

}  // namespace dreamcomm::gpu

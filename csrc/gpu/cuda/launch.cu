#include <algorithm>

#include "gpu/cuda/check.cuh"
#include "gpu/cuda/kernels.cuh"
#include "gpu/host/launch.h"
#include "gpu/host/supported_ops.h"

namespace dreamcomm::gpu {
namespace {

Kernel kernel_of(const CallInfo& info) {
  if (info.op == ReduceOp::kNone) return move_kernel_of();
  const bool computed = computed_as({.dtype = info.dtype, .op = info.op}).has_value();
  for (const auto& of : {float_kernels, half_kernels, integer_kernels}) {
    const Kernel kernel = of(info.dtype);
    if (computed && kernel != nullptr) return kernel;
  }
  throw Error(ErrorKind::kInvalid,
              concat("there is no kernel for ", name(info.op), " of ", name(info.dtype)));
}

/// The number of blocks of the kernel that the device runs at the same time.
int resident(Kernel kernel, int lanes) {
  int device = 0;
  int processors = 0;
  int each = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, lanes, 0),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return each * processors;
}

void check_shape(const Grid& grid, const Layout& layout) {
  check(grid.blocks >= 1 && grid.blocks <= layout.blocks && grid.lanes >= 1 && grid.lanes <= kLanes,
        ErrorKind::kInvalid, "a kernel has 1 to ", layout.blocks, " blocks of 1 to ", kLanes,
        " lanes; got ", grid.blocks, " of ", grid.lanes);
}

/// Checks that all ranks' blocks run at the same time, because they wait for each other.
void check_room(const Grid& grid, Kernel kernel, int ranks) {
  const int room = resident(kernel, grid.lanes);
  check(grid.blocks * ranks <= room, ErrorKind::kInvalid, ranks, " ranks of ", grid.blocks,
        " blocks wait for each other, but the device runs only ", room,
        " such blocks at the same time: use fewer blocks or fewer ranks");
}

}  // namespace

bool is_built() { return true; }

int runtime_version() { return CUDART_VERSION; }

int device_count(std::string& why) {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result == cudaSuccess) return count;
  cudaGetLastError();
  why = concat("CUDA said ", cudaGetErrorName(result), " (", cudaGetErrorString(result), ')');
  return 0;
}

int most_lanes() { return kLanes; }

void load_kernels() {
  cudaFuncAttributes attributes{};
  std::size_t stack = 0;
  const auto load = [&](Kernel kernel) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    stack = std::max(stack, attributes.localSizeBytes);
  };
  load(move_kernel_of());
  for (int type = 0; type <= static_cast<int>(DType::kOpaque); ++type) {
    for (const auto& of : {float_kernels, half_kernels, integer_kernels}) {
      if (const Kernel kernel = of(static_cast<DType>(type))) load(kernel);
    }
  }
  // The stack is enlarged here, because enlarging it at a launch waits for running kernels, too.
  std::size_t limit = 0;
  check_cuda(cudaDeviceGetLimit(&limit, cudaLimitStackSize), "cudaDeviceGetLimit");
  if (limit < stack)
    check_cuda(cudaDeviceSetLimit(cudaLimitStackSize, stack), "cudaDeviceSetLimit");
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status),
             "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void launch(const KernelArgs& args, Grid grid, void* stream) {
  const Kernel kernel = kernel_of(args.info);
  check_shape(grid, args.layout);
  KernelArgs copy = args;
  const KernelArgs* none = nullptr;
  void* arguments[] = {&copy, &none};
  check_cuda(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(grid.blocks)),
                              dim3(static_cast<unsigned>(grid.lanes)), arguments, 0,
                              static_cast<cudaStream_t>(stream)),
             "cudaLaunchKernel");
}

void launch_ranks(std::span<const KernelArgs> calls, const KernelArgs* rank_args, Grid grid,
                  void* stream) {
  check(calls.size() > 1, ErrorKind::kInvalid, "launch_ranks is for several ranks; got ",
        calls.size());
  const Kernel kernel = kernel_of(calls[0].info);
  check_shape(grid, calls[0].layout);
  check_room(grid, kernel, static_cast<int>(calls.size()));
  KernelArgs first = calls[0];
  void* arguments[] = {&first, &rank_args};
  const dim3 shape(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(calls.size()));
  check_cuda(cudaLaunchCooperativeKernel(kernel, shape, dim3(static_cast<unsigned>(grid.lanes)),
                                         arguments, 0, static_cast<cudaStream_t>(stream)),
             "cudaLaunchCooperativeKernel");
}

}  // namespace dreamcomm::gpu

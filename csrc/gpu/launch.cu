#include "gpu/check.cuh"
#include "gpu/kernels.cuh"
#include "gpu/launch.h"

namespace dreamcomm::gpu {
namespace {

Kernel kernel_of(const CallCard& card) {
  if (card.op == ReduceOp::kNone) return move_kernel_of();
  for (const auto& of : {float_kernels, half_kernels, integer_kernels}) {
    if (const Kernel kernel = of(card.dtype)) return kernel;
  }
  throw Error(ErrorKind::kInvalid,
              concat("GPUs do not compute with ", name(card.dtype), " here: use float32, float64, ",
                     "float16, bfloat16, uint8, int8, int16, int32 or int64"));
}

void check_grid(const Grid& grid, const Layout& layout) {
  check(grid.blocks >= 1 && grid.blocks <= layout.blocks && grid.lanes >= 1 && grid.lanes <= kLanes,
        ErrorKind::kInvalid, "a kernel has 1 to ", layout.blocks, " blocks of 1 to ", kLanes,
        " lanes; got ", grid.blocks, " of ", grid.lanes);
}

/// Blocks of the kernel that the device runs at the same time.
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
  const auto load = [&](Kernel kernel) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  };
  load(move_kernel_of());
  for (int type = 0; type <= static_cast<int>(DType::kOpaque); ++type) {
    for (const auto& of : {float_kernels, half_kernels, integer_kernels}) {
      if (const Kernel kernel = of(static_cast<DType>(type))) load(kernel);
    }
  }
}

void launch(const Task& task, Grid grid, void* stream) {
  check_grid(grid, task.layout);
  Task copy = task;
  const Task* none = nullptr;
  void* arguments[] = {&copy, &none};
  check_cuda(cudaLaunchKernel(kernel_of(task.card), dim3(static_cast<unsigned>(grid.blocks)),
                              dim3(static_cast<unsigned>(grid.lanes)), arguments, 0,
                              static_cast<cudaStream_t>(stream)),
             "cudaLaunchKernel");
}

void launch_ranks(std::span<const Task> calls, const Task* tasks, Grid grid, void* stream) {
  check(calls.size() > 1, ErrorKind::kInvalid, "launch_ranks is for several ranks; got ",
        calls.size());
  check_grid(grid, calls[0].layout);
  const Kernel kernel = kernel_of(calls[0].card);
  const int room = resident(kernel, grid.lanes);
  const int wanted = grid.blocks * static_cast<int>(calls.size());
  check(wanted <= room, ErrorKind::kInvalid, calls.size(), " ranks of ", grid.blocks,
        " blocks wait for each other, but the device runs only ", room,
        " such blocks at a time: take fewer blocks or fewer ranks");
  Task first = calls[0];
  void* arguments[] = {&first, &tasks};
  const dim3 shape(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(calls.size()));
  check_cuda(cudaLaunchCooperativeKernel(kernel, shape, dim3(static_cast<unsigned>(grid.lanes)),
                                         arguments, 0, static_cast<cudaStream_t>(stream)),
             "cudaLaunchCooperativeKernel");
}

}  // namespace dreamcomm::gpu

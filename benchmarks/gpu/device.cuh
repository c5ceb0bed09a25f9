// Times on a device, and kernels that fill and compare, which are not timed.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "gpu/cuda/check.cuh"
#include "gpu/host/memory.h"

namespace dreamcomm::benchmark {

using gpu::check_cuda;

struct Event {
  Event() { check_cuda(cudaEventCreate(&event), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

/// The median of the times of `call`, which puts work on a stream, in seconds.
template <typename Call>
double median_seconds(cudaStream_t stream, int repeats, const Call& call) {
  const Event begin;
  const Event end;
  std::vector<double> times;
  for (int i = 0; i < repeats + 3; ++i) {
    check_cuda(cudaEventRecord(begin.event, stream), "cudaEventRecord");
    call();
    check_cuda(cudaEventRecord(end.event, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end.event), "cudaEventSynchronize");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin.event, end.event), "cudaEventElapsedTime");
    if (i >= 3) times.push_back(1e-3 * milliseconds);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// Bytes read and written each second by a copy within the device.
inline double copy_rate(std::size_t bytes, int repeats) {
  const gpu::OwnStream stream;
  const gpu::DeviceMemory from(bytes);
  const gpu::DeviceMemory to(bytes);
  auto* handle = static_cast<cudaStream_t>(stream.get());
  const double seconds = median_seconds(handle, repeats, [&] {
    check_cuda(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, handle),
               "cudaMemcpyAsync");
  });
  return 2.0 * static_cast<double>(bytes) / seconds;
}

/// Element i of a rank's input is its factor times this. The numbers are small integers, so that
/// every sum is exact, and neighbouring elements differ.
__device__ __forceinline__ float pattern(std::size_t i) { return static_cast<float>(1 + i % 13); }

__global__ void fill_kernel(float* out, std::size_t count, float factor) {
  const std::size_t step = std::size_t{blockDim.x} * gridDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    out[i] = factor * pattern(i);
  }
}

/// Counts the elements that are not `factor` times the pattern from element `first` on.
__global__ void compare_kernel(const float* found, std::size_t count, std::size_t first,
                               float factor, unsigned long long* wrong) {
  const std::size_t step = std::size_t{blockDim.x} * gridDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    if (found[i] != factor * pattern(first + i)) atomicAdd(wrong, 1ULL);
  }
}

}  // namespace dreamcomm::benchmark

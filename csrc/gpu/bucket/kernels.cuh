// The kernels of pack and unpack: bodies on CUDA threads.
#pragma once

#include "gpu/bucket/bucket.h"
#include "gpu/bucket/plan.h"
#include "gpu/cuda/target.cuh"

namespace dreamcomm::gpu {

inline constexpr int kBucketLanes = 256;  // lanes of a block

/// A kernel's table of tensors, in its parameters, so that no copy is needed before the launch.
template <int kCount>
struct PartTable {
  Part at[kCount];
};

/// The memory that the lanes of a block share; its size is given at the launch.
__device__ __forceinline__ std::byte* shared_scratch() {
  extern __shared__ uint4 memory[];
  return reinterpret_cast<std::byte*>(memory);
}

template <bool kPacks, typename From, typename To, int kCount>
__global__ void __launch_bounds__(kBucketLanes)
    bucket_kernel(const __grid_constant__ BucketTask task,
                  const __grid_constant__ PartTable<kCount> parts) {
  bucket_body<kPacks, From, To>(CudaTarget(), task, parts.at, shared_scratch());
}

/// The same with a table in memory of the device, for any number of tensors.
template <bool kPacks, typename From, typename To>
__global__ void __launch_bounds__(kBucketLanes)
    listed_bucket_kernel(const __grid_constant__ BucketTask task, const Part* parts) {
  bucket_body<kPacks, From, To>(CudaTarget(), task, parts, shared_scratch());
}

/// A kernel for cudaLaunchKernel, in both sizes of its table, and with a table in device memory.
struct BucketKernel {
  const void* few = nullptr;
  const void* many = nullptr;
  const void* listed = nullptr;
  std::size_t scratch = 0;  // bytes of shared memory that a block needs for an inspection
  std::size_t tile = 1;     // elements that a block takes at a time
};

template <bool kPacks, typename From, typename To>
BucketKernel bucket_kernel_between() {
  return {reinterpret_cast<const void*>(&bucket_kernel<kPacks, From, To, kFewParts>),
          reinterpret_cast<const void*>(&bucket_kernel<kPacks, From, To, kManyParts>),
          reinterpret_cast<const void*>(&listed_bucket_kernel<kPacks, From, To>),
          bucket_scratch<To>(), kTile<To>};
}

template <typename From>
BucketKernel bucket_kernel_from(bool packs, DType to) {
  BucketKernel found;
  with_format(to, [&]<typename To>(std::type_identity<To>) {
    if constexpr (!std::is_integral_v<typename To::Accumulator>) {
      found = packs ? bucket_kernel_between<true, From, To>()
                    : bucket_kernel_between<false, From, To>();
    }
  });
  return found;
}

// Each is in its own file, so that they compile in parallel.
BucketKernel bucket_kernel_from_float32(bool packs, DType to);
BucketKernel bucket_kernel_from_float64(bool packs, DType to);
BucketKernel bucket_kernel_from_float16(bool packs, DType to);
BucketKernel bucket_kernel_from_bfloat16(bool packs, DType to);

}  // namespace dreamcomm::gpu

// Macros by which one source is compiled by nvcc for the GPU and by the C++ compiler for the host
// target (gpu/collectives/host_target.h).
#pragma once

#if defined(__CUDACC__)
#define DREAMCOMM_DEVICE __device__ __forceinline__
// A loop over much data, called from many rows: compiled once.
#define DREAMCOMM_DEVICE_LOOP __device__ __noinline__
#else
#define DREAMCOMM_DEVICE inline
#define DREAMCOMM_DEVICE_LOOP inline
#endif

namespace dreamcomm::gpu {

inline constexpr int kMaxRanks = 16;    // of a group, in one host
inline constexpr int kMaxBlocks = 304;  // of a kernel: two for each multiprocessor
inline constexpr int kSector = 128;     // bytes that a GPU moves at a time; two writers never share

}  // namespace dreamcomm::gpu

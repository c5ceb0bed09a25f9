// CUDA threads as lanes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/collectives/window.h"

namespace dreamcomm::gpu {

/// One thread of a kernel whose grid is (blocks, ranks), with one rank, or several that share the
/// device (launch.h).
class CudaTarget {
 public:
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int lanes() const { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ int block() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ int blocks() const { return static_cast<int>(gridDim.x); }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ bool any(bool mine) const { return __syncthreads_or(mine) != 0; }

  // These have system scope, because peers are other GPUs, other processes and the host.
  __device__ __forceinline__ void publish(std::uint64_t* word, std::uint64_t value) const {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  __device__ __forceinline__ std::uint64_t read(std::uint64_t* word) const {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  __device__ __forceinline__ void write_relaxed(std::uint64_t* word, std::uint64_t value) const {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  __device__ __forceinline__ std::uint64_t read_relaxed(std::uint64_t* word) const {
    std::uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  // Both halves in one access; the memory model treats each as one number.
  __device__ __forceinline__ void write_packet(LLPacket* to, const LLPacket& packet) const {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(packet.half[0]),
                 "l"(packet.half[1])
                 : "memory");
  }
  __device__ __forceinline__ LLPacket read_packet(const LLPacket* from) const {
    LLPacket packet;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(packet.half[0]), "=l"(packet.half[1])
                 : "l"(from)
                 : "memory");
    return packet;
  }
  __device__ __forceinline__ bool claim(std::uint64_t* word, std::uint64_t value) const {
    return atomicCAS_system(reinterpret_cast<unsigned long long*>(word), 0ULL,
                            static_cast<unsigned long long>(value)) == 0ULL;
  }
  __device__ __forceinline__ std::uint64_t now() const {
    std::uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  }
  __device__ __forceinline__ void pause() const { __nanosleep(20); }
  __device__ __forceinline__ void count(std::size_t, int, int) const {}
  __device__ __forceinline__ void count_by_one(std::size_t, int, int) const {}
};

}  // namespace dreamcomm::gpu

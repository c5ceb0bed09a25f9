#include <cstring>

#include "core/schedule.h"
#include "gpu/cuda/check.cuh"
#include "gpu/host/memory.h"

namespace dreamcomm::gpu {
namespace {

/// Smaller allocations share a piece of this size: a process that opens one by its base also gets
/// its neighbours.
constexpr std::size_t kAllocation = std::size_t{2} << 20;

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

/// Uses its own stream and waits: cudaMemset would neither wait nor make other streams wait.
void zero(void* memory, std::size_t bytes) {
  const OwnStream stream;
  check_cuda(cudaMemsetAsync(memory, 0, bytes, as_stream(stream.get())), "cudaMemsetAsync");
  stream.wait();
}

}  // namespace

DeviceMemory::DeviceMemory(std::size_t bytes) : bytes_(chunks(bytes, kAllocation) * kAllocation) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, bytes_), "cudaMalloc");
  data_ = static_cast<std::byte*>(memory);
  try {
    zero(memory, bytes_);
  } catch (...) {
    cudaFree(memory);
    throw;
  }
}

// A destructor cannot report errors; at exit the context may already be destroyed.
DeviceMemory::~DeviceMemory() { cudaFree(data_); }

MappedMemory::MappedMemory(std::size_t bytes) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc");
  std::memset(memory, 0, bytes);
  data_ = static_cast<std::byte*>(memory);
}

MappedMemory::~MappedMemory() { cudaFreeHost(data_); }

OwnStream::OwnStream() {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = stream;
}

OwnStream::~OwnStream() { cudaStreamDestroy(as_stream(stream_)); }

void OwnStream::copy(void* to, const void* from, std::size_t bytes) const {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream_)),
             "cudaMemcpyAsync");
  wait();
}

void OwnStream::wait() const {
  check_cuda(cudaStreamSynchronize(as_stream(stream_)), "cudaStreamSynchronize");
}

}  // namespace dreamcomm::gpu

#include <cstring>

#include "gpu/check.cuh"
#include "gpu/memory.h"

namespace dreamcomm::gpu {
namespace {

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

DeviceMemory::DeviceMemory(std::size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
  data_ = static_cast<std::byte*>(memory);
  const cudaError_t zeroed = cudaMemset(memory, 0, bytes);
  if (zeroed != cudaSuccess) cudaFree(memory);
  check_cuda(zeroed, "cudaMemset");
}

// A destructor has nobody to tell; the context may be gone at exit.
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

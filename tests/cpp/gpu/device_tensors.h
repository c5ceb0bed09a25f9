// Calls whose tensors lie on a GPU.
#pragma once

#include <cstddef>

#include "cpp/gpu/tensors.h"
#include "gpu/host/communicator.h"
#include "gpu/host/memory.h"

namespace dreamcomm::testing {

inline constexpr std::size_t kTensorBytes = std::size_t{8} << 20;  // of all tensors of a call

/// Nothing is allocated for a call: that may wait for the kernels that run, and they for this
/// rank.
inline Copied on_device(const gpu::OwnStream& stream, const Request& request, std::byte* memory) {
  return {request, memory, [&stream](void* to, const void* from, std::size_t bytes) {
            stream.copy(to, from, bytes);
          }};
}

inline void run_on(gpu::Communicator& group, const gpu::OwnStream& stream, const Request& request,
                   std::byte* memory) {
  const Copied there = on_device(stream, request, memory);
  group.run(there.request(), stream.get());
  stream.wait();
  if (const auto failed = group.failure()) throw *failed;
  there.bring();
}

}  // namespace dreamcomm::testing

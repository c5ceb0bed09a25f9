// Pack and unpack on a GPU. No CUDA header is seen here: without nvcc a stand-in is
// compiled.
#pragma once

#include "core/schedule.h"
#include "kernels/bucket.h"
#include "kernels/inspector.h"

namespace dreamcomm::gpu {

/// Partial sums that an inspection of so many elements needs room for.
constexpr std::size_t partials_of(std::size_t count) {
  return chunks(count, kernels::Inspector::kBlock);
}

/// Memory of the device for an inspection: partials_of() sums, and where the results go.
struct Inspection {
  double* partials = nullptr;
  double* squares = nullptr;
  bool* finite = nullptr;
};

/// As dreamcomm::pack(), on memory of the current device, in the order of a stream (a
/// cudaStream_t); returns before it is done. One kernel for up to kManyParts tensors.
/// Throws Error(kInvalid) for types that are not packable, Error(kSystem) with CUDA's words.
Moved pack(const PackJob& job, void* stream);

/// As dreamcomm::unpack(), the same; with job.inspect one more, small kernel.
Moved unpack(const UnpackJob& job, const Inspection& inspection, void* stream);

}  // namespace dreamcomm::gpu

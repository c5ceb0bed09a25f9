// Pack and unpack on a GPU. Includes no CUDA header: without nvcc a stub is compiled instead.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "core/schedule.h"
#include "kernels/bucket.h"
#include "kernels/inspector.h"

namespace dreamcomm::gpu {

/// The number of partial sums of an inspection of so many elements.
constexpr std::size_t partials_of(std::size_t count) {
  return chunks(count, kernels::Inspector::kBlock);
}

/// Memory of the device for an inspection: partials_of() sums, and the results.
struct Inspection {
  double* partials = nullptr;
  double* squares = nullptr;
  bool* finite = nullptr;
};

/// Puts bytes of the host into memory of the device, in the order of the stream. The caller may
/// change `bytes` when it returns. The result stays valid until the stream reaches the next call's
/// copy. Null if it cannot.
using Stage = std::function<const void*(std::span<const std::byte> bytes)>;

/// Like dreamcomm::pack(), on memory of the current device, in the order of a stream (a
/// cudaStream_t); returns before it is done. It starts one kernel. The table of more than
/// kManyParts tensors does not fit into a kernel's parameters: `stage` puts it into device memory,
/// or there is one kernel for each kManyParts tensors. Throws Error(kInvalid) for types that are
/// not packable, Error(kSystem) with CUDA's text.
Moved pack(const PackJob& job, void* stream, const Stage& stage = {});

/// Like dreamcomm::unpack(), in the same way; job.inspect adds one small kernel.
Moved unpack(const UnpackJob& job, const Inspection& inspection, void* stream,
             const Stage& stage = {});

}  // namespace dreamcomm::gpu

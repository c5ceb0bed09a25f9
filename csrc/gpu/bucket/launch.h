// Pack and unpack on a GPU. No CUDA header is seen here: without nvcc a stand-in is
// compiled.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

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

/// Puts bytes of the host into memory of the device, in the order of the stream; they may change
/// when it returns, and what it returns stays until the stream has come to what is put there next.
/// Null where it cannot.
using Stage = std::function<const void*(std::span<const std::byte> bytes)>;

/// As dreamcomm::pack(), on memory of the current device, in the order of a stream (a
/// cudaStream_t); returns before it is done. One kernel; of more than kManyParts tensors, whose
/// table a kernel's parameters have no room for, it is put there by `stage`, or there is a kernel
/// for each so many. Throws Error(kInvalid) for types that are not packable, Error(kSystem) with
/// CUDA's words.
Moved pack(const PackJob& job, void* stream, const Stage& stage = {});

/// As dreamcomm::unpack(), the same; with job.inspect one more, small kernel.
Moved unpack(const UnpackJob& job, const Inspection& inspection, void* stream,
             const Stage& stage = {});

}  // namespace dreamcomm::gpu

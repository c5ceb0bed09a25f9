// Reduces nodes' results in a device's memory, by torch's own operations on the current stream. The
// bits are those of kernels/reduce.h, except in a NaN.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <span>

#include "core/types.h"

namespace dreamcomm {

/// Elements of a type, one after the other.
struct Elements {
  DType type;
  std::byte* data;
};

/// Copies elements, from halves to float32 or back, or within one type.
void convert_on_device(const Elements& to, const Elements& from, std::size_t count,
                       c10::Device device);

/// Combines `count` elements from left to right. Float32 is rounded once if `out` is a half; halves
/// are added up in float32. For the reductions that gpu::computed_as knows.
void reduce_on_device(const Reduction& how, std::span<const std::byte* const> from,
                      const Elements& out, std::size_t count, c10::Device device);

}  // namespace dreamcomm

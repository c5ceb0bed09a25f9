// Sums of a device's memory, by torch's own operations on the current stream: what is left to do
// for hosts' results. The bits are those of kernels/reduce.h, but for those of a NaN.
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

/// Between halves and float32, or of one type.
void convert_on_device(const Elements& to, const Elements& from, std::size_t count,
                       c10::Device device);

/// `count` elements, combined from left to right; where `out` is a half and they are float32, it is
/// rounded once. Halves are added up in float32. For what gpu::computed_as knows.
void reduce_on_device(const Reduction& how, std::span<const std::byte* const> from,
                      const Elements& out, std::size_t count, c10::Device device);

}  // namespace dreamcomm

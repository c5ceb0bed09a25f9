// The memory in which buckets are reduced.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "c10d/buckets/rule.h"

namespace dreamcomm {

/// A tensor of one dimension, in memory that the group's backend reduces without a copy, where it
/// has such. Its device is that of `like`.
at::Tensor allocate(const Rule& rule, std::int64_t size, const at::Tensor& like,
                    at::ScalarType type);

/// Another tensor on the flat tensor's memory, in the order in which `like` has its elements. No
/// view of autograd: it has a version of its own, and may be detached.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like);

void copy_into_place(const at::Tensor& to, const at::Tensor& from);

/// A dense tensor's elements one after the other, in the order in which they lie in memory.
inline at::Tensor in_memory_order(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1});
}

/// A sparse gradient of no rows.
at::Tensor no_rows(const at::Tensor& parameter);

}  // namespace dreamcomm

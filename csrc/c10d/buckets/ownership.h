// Who has a tensor's memory.
//
// Autograd makes a parameter's gradient of the tensor that arrives there, without a copy, if there
// is no other reference to that tensor. Its memory may still be another tensor's: of `x + bias`
// both gradients are one memory, or one is a view of the other, and the other one flows on through
// the graph. Hooks and retain_grad() keep further tensors. A gradient is written to in place when
// it is reduced, so it has to be the only one on its memory: one rule for all ways of training.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace dreamcomm {

/// True if no tensor has the memory besides this one, what it alone is a view of, and `known`
/// others that the caller has.
bool owns_memory(const at::Tensor& tensor, std::size_t known = 0);

/// True if the tensor has no other reference, and owns its memory.
bool is_alone(const at::Tensor& tensor);

/// How many tensors on its memory end with this one: itself, and the base that it is a view of,
/// if that has no other reference.
std::size_t count_with_own_base(const at::Tensor& tensor);

/// True if both are defined, and have one storage.
bool shares_storage(const at::Tensor& one, const at::Tensor& other);

}  // namespace dreamcomm

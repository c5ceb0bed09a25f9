// An optimizer's step of rows that this rank has, where parameters are sharded between uses.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "kernels/optimizer/optimizer.h"

namespace dreamcomm {

/// Steps each of `rows` that has a gradient, and its state, in place, by the rule of its number:
/// `rule_of[i]` of row i. Nothing is sent. A row is a dense CPU tensor of float32 or float64; its
/// gradient and states have its elements in the order of memory, flat or in its shape. The bits are
/// those of an OptimizerPass.
void step_rows(const std::vector<OptimizerRule>& rules, const std::vector<int>& rule_of,
               const std::vector<at::Tensor>& rows,
               const std::vector<std::optional<at::Tensor>>& gradients,
               const std::vector<std::vector<at::Tensor>>& states);

/// A tensor's memory, to be written; null if it is undefined.
std::byte* memory_of(const at::Tensor& tensor);
/// The memory of a parameter and of what an optimizer keeps of it. Throws c10::ValueError if that
/// is more than any optimizer does.
OptimizerMemory memory_of(const at::Tensor& parameter, const std::vector<at::Tensor>& states);
/// The same from some bytes on.
OptimizerMemory memory_from(const OptimizerMemory& memory, std::size_t bytes);

}  // namespace dreamcomm

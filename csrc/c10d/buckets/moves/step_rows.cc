#include "c10d/buckets/moves/step_rows.h"

#include <algorithm>

#include "c10d/base/convert.h"

namespace dreamcomm {
namespace {

/// Elements: a tile of all that a step reads and writes lies in the L2 cache. A sharded pass has
/// tiles of the same size, on which the bits of torch's square roots depend.
constexpr std::size_t kStepTile = 16384;

void require_steppable(const at::Tensor& tensor, const at::Tensor& row, const char* what,
                       std::size_t index) {
  const at::ScalarType type = row.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kDouble, "step_rows: expected row ", index,
                    " in float32 or float64, got ", type);
  TORCH_CHECK_VALUE(
      tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense(),
      "step_rows: expected the ", what, " of row ", index, " to be a dense CPU tensor, got one on ",
      tensor.device(), " with shape ", tensor.sizes());
  TORCH_CHECK_VALUE(tensor.scalar_type() == type && tensor.numel() == row.numel(),
                    "step_rows: expected the ", what, " of row ", index, " to have ", row.numel(),
                    " elements of ", type, ", got ", tensor.numel(), " of ", tensor.scalar_type());
  const bool in_order = tensor.dim() == 1 || tensor.strides() == row.strides() ||
                        (tensor.is_contiguous() && row.is_contiguous());
  TORCH_CHECK_VALUE(in_order, "step_rows: expected the ", what, " of row ", index,
                    " flat or with its strides ", row.strides(), ", got ", tensor.strides());
}

void step_row(const OptimizerRule& rule, const at::Tensor& row, const at::Tensor& gradient,
              const std::vector<at::Tensor>& states) {
  const OptimizerMemory memory = memory_of(row, states);
  const auto* const from = static_cast<const std::byte*>(gradient.const_data_ptr());
  const auto numel = static_cast<std::size_t>(row.numel());
  for (std::size_t done = 0; done < numel; done += kStepTile) {
    const std::size_t bytes = done * row.element_size();
    optimizer_step(rule, to_dtype(row.scalar_type()), memory_from(memory, bytes), from + bytes,
                   std::min(kStepTile, numel - done));
  }
  // Autograd notices the step, like any operation in place.
  if (!row.is_inference()) row.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void step_rows(const std::vector<OptimizerRule>& rules, const std::vector<int>& rule_of,
               const std::vector<at::Tensor>& rows,
               const std::vector<std::optional<at::Tensor>>& gradients,
               const std::vector<std::vector<at::Tensor>>& states) {
  const std::size_t count = rows.size();
  TORCH_CHECK_VALUE(rule_of.size() == count && gradients.size() == count && states.size() == count,
                    "step_rows: expected a rule, gradient and state for each of ", count,
                    " rows, got ", rule_of.size(), ", ", gradients.size(), " and ", states.size());
  const auto has_gradient = [&](std::size_t i) { return gradients[i] && gradients[i]->defined(); };
  for (std::size_t i = 0; i < count; ++i) {
    if (!has_gradient(i)) continue;
    TORCH_CHECK_VALUE(rule_of[i] >= 0 && static_cast<std::size_t>(rule_of[i]) < rules.size(),
                      "step_rows: expected the number of one of ", rules.size(), " rules for row ",
                      i, ", got ", rule_of[i]);
    require_steppable(rows[i], rows[i], "parameter", i);
    require_steppable(*gradients[i], rows[i], "gradient", i);
    for (const at::Tensor& state : states[i]) require_steppable(state, rows[i], "state", i);
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (!has_gradient(i)) continue;
    step_row(rules[static_cast<std::size_t>(rule_of[i])], rows[i], *gradients[i], states[i]);
  }
}

std::byte* memory_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::byte*>(tensor.mutable_data_ptr()) : nullptr;
}

OptimizerMemory memory_of(const at::Tensor& parameter, const std::vector<at::Tensor>& states) {
  OptimizerMemory memory;
  TORCH_CHECK_VALUE(states.size() <= memory.state.size(), "expected at most ", memory.state.size(),
                    " states of a parameter, got ", states.size());
  memory.parameter = memory_of(parameter);
  std::transform(states.begin(), states.end(), memory.state.begin(),
                 [](const at::Tensor& state) { return memory_of(state); });
  return memory;
}

OptimizerMemory memory_from(const OptimizerMemory& memory, std::size_t bytes) {
  const auto at = [bytes](std::byte* data) { return data == nullptr ? nullptr : data + bytes; };
  OptimizerMemory moved;
  moved.parameter = at(memory.parameter);
  std::transform(memory.state.begin(), memory.state.end(), moved.state.begin(), at);
  return moved;
}

}  // namespace dreamcomm

// The optimizers' steps, compiled for given vectors. optimizer.h says what they compute.
#pragma once

#include <cstddef>

#include "core/types.h"
#include "kernels/optimizer/fused.h"
#include "kernels/optimizer/optimizer.h"

namespace dreamcomm::kernels {

/// The rows of one step.
struct StepRows {
  OptimizerMemory memory;
  const std::byte* gradient = nullptr;
  std::size_t count = 0;
};

// `type` is float32 or float64, and the rows are those that the rule needs.
void adam_step(Vectors level, const AdamRule& rule, DType type, const StepRows& rows);
void sgd_step(Vectors level, const SgdRule& rule, DType type, const StepRows& rows);

}  // namespace dreamcomm::kernels

// Sums of the gradients of replicas.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dreamcomm {

/// The first term plus the second, plus the third, and so on; undefined without terms. With `own`
/// the sum is written over the first term, if nothing else reads that memory.
at::Tensor add_in_order(const std::vector<at::Tensor>& terms, bool own);

}  // namespace dreamcomm

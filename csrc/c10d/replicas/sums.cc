#include "c10d/replicas/sums.h"

#include <ATen/ops/add.h>

#include "c10d/buckets/ownership.h"

namespace dreamcomm {

at::Tensor add_in_order(const std::vector<at::Tensor>& terms, bool own) {
  at::Tensor sum;
  for (const at::Tensor& term : terms) {
    if (!sum.defined()) {
      sum = term;
      own = own && sum.layout() == at::kStrided && owns_memory(sum);
    } else if (own && sum.scalar_type() == term.scalar_type() && term.layout() == at::kStrided) {
      sum.add_(term);
    } else {
      sum = at::add(sum, term);
      own = sum.layout() == at::kStrided;
    }
  }
  return sum;
}

}  // namespace dreamcomm

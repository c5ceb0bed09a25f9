// Counts of the tensors on one memory.
#include "c10d/buckets/ownership.h"

#include <ATen/ops/zeros.h>
#include <doctest.h>

namespace dreamcomm {
namespace {

TEST_CASE("a tensor owns its memory unless another one lies on it") {
  const at::Tensor tensor = at::zeros({4, 2});
  CHECK(owns_memory(tensor));
  const at::Tensor other = tensor.detach();
  CHECK_FALSE(owns_memory(tensor));
  CHECK_FALSE(owns_memory(other));
  CHECK(owns_memory(tensor, 1));
  CHECK(shares_storage(tensor, other));
  CHECK_FALSE(shares_storage(tensor, at::zeros({4, 2})));
}

TEST_CASE("a view owns the memory of a base that nothing else refers to") {
  at::Tensor base = at::zeros({4, 2});
  const at::Tensor view = base.view({8});
  CHECK_FALSE(owns_memory(view));
  base.reset();
  CHECK(count_with_own_base(view) == 2);
  CHECK(owns_memory(view));
}

}  // namespace
}  // namespace dreamcomm

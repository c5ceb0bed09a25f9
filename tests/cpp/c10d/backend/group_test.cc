// Groups of torch whose ranks are threads of one process.
#include <ATen/ops/full.h>
#include <doctest.h>

#include "cpp/c10d/support/group_ranks.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

void all_reduce(GroupRank& self, at::Tensor tensor) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  self.group->allreduce(tensors)->wait();
}

TEST_CASE("ranks as threads reduce tensors, in the heap and elsewhere") {
  for (const int size : {1, 2, 3, 4}) {
    CAPTURE(size);
    CHECK_NOTHROW(run_group({.size = size}, [](GroupRank& self) {
      const at::Tensor plain = at::full({1000}, self.rank + 1.0F);
      const at::Tensor shared = self.backend->allocateTensor(1000, at::kFloat);
      shared.fill_(self.rank + 1.0F);
      all_reduce(self, plain);
      all_reduce(self, shared);
      const float sum = static_cast<float>(self.size * (self.size + 1)) / 2;
      require(plain.eq(sum).all().item<bool>(), "a wrong sum");
      require(shared.eq(sum).all().item<bool>(), "a wrong sum in the heap");
    }));
  }
}

TEST_CASE("a rank that fails aborts its group for the others") {
  const auto run = [] {
    run_group({.size = 2}, [](GroupRank& self) {
      require(self.rank != 1, "no more of this");
      all_reduce(self, at::full({10}, 1.0F));
    });
  };
  CHECK_THROWS_WITH_AS(run(), doctest::Contains("rank 0: "), std::runtime_error);
  CHECK_THROWS_WITH_AS(run(), doctest::Contains("rank 1: no more of this"), std::runtime_error);
}

}  // namespace
}  // namespace dreamcomm::testing

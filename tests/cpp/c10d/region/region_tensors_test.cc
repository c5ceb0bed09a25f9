// Tensors on a region.
#include "c10d/region/region_tensors.h"

#include <ATen/ops/arange.h>
#include <doctest.h>

#include "c10d/buckets/ownership.h"

namespace dreamcomm {
namespace {

TEST_CASE("tensors of a region have storages of their own, and keep it alive") {
  auto region = std::make_shared<Region>(create_memfd("dreamcomm-test", 4096), 100, true);
  const at::Tensor rows = region_tensor(region, 8, {3, 2}, {2, 1}, at::kFloat, /*writable=*/true);
  const at::Tensor whole = region_tensor(region, 8, {2, 3}, {1, 2}, at::kFloat, /*writable=*/false);
  const at::Tensor none = region_tensor(region, 100, {0, 2}, {2, 1}, at::kByte, /*writable=*/true);
  const at::Tensor scalar = region_tensor(region, 32, {}, {}, at::kDouble, /*writable=*/true);
  const std::weak_ptr<Region> seen = region;
  region = nullptr;
  CHECK(rows.storage().nbytes() == 24);
  CHECK(rows.storage_offset() == 0);
  CHECK(owns_memory(rows));
  CHECK_FALSE(shares_storage(rows, whole));
  CHECK(none.numel() == 0);
  CHECK(scalar.storage().nbytes() == 8);
  rows.copy_(at::arange(6, at::kFloat).view({3, 2}));
  CHECK(whole.t().equal(rows));
  CHECK_FALSE(seen.expired());
}

TEST_CASE("a region ends with its last tensor") {
  auto region = std::make_shared<Region>(create_memfd("dreamcomm-test", 4096), 4096, false);
  const std::weak_ptr<Region> seen = region;
  {
    const at::Tensor one = region_tensor(region, 0, {4}, {1}, at::kFloat, /*writable=*/false);
    region = nullptr;
    CHECK(one.sum().item<float>() == 0);
  }
  CHECK(seen.expired());
}

TEST_CASE("tensors beyond a region, and those with gaps, are refused") {
  const auto region = std::make_shared<Region>(create_memfd("dreamcomm-test", 4096), 100, false);
  const auto make = [&](std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
    region_tensor(region, offset, sizes, strides, at::kFloat, /*writable=*/true);
  };
  CHECK_NOTHROW(make(0, {25}, {1}));
  CHECK_THROWS_AS(make(4, {25}, {1}), c10::ValueError);
  CHECK_THROWS_AS(make(-4, {1}, {1}), c10::ValueError);
  CHECK_THROWS_AS(make(104, {0}, {1}), c10::ValueError);
  CHECK_THROWS_AS(make(2, {1}, {1}), c10::ValueError);
  CHECK_THROWS_AS(make(0, {2, 2}, {4, 1}), c10::ValueError);
  CHECK_THROWS_AS(make(0, {2, 2}, {1}), c10::ValueError);
  CHECK_THROWS_AS(make(0, {-1}, {1}), c10::ValueError);
  CHECK_THROWS_AS(make(0, {std::int64_t{1} << 62, 4}, {4, 1}), c10::ValueError);
}

TEST_CASE("a write in place to either of two tensors shows in the version of both") {
  const at::Tensor owner = at::arange(4, at::kFloat);
  const at::Tensor tensor = at::arange(4, at::kFloat);
  share_version(tensor, owner);
  const auto before = owner._version();
  tensor.add_(1);
  owner.add_(1);
  CHECK(owner._version() == before + 2);
  CHECK(tensor._version() == before + 2);
}

}  // namespace
}  // namespace dreamcomm

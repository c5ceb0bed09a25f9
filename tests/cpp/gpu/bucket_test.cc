// The GPU's pack and unpack give the CPU's bits.
#include "cpp/gpu/bucket.h"

#include <doctest.h>

#include <bit>
#include <cstring>

#include "cpp/support/buckets.h"
#include "gpu/bucket/plan.h"

namespace dreamcomm::testing {
namespace {

constexpr Grid kGrids[] = {{1, 1}, {2, 3}, {1, 8}};

/// A pack by the CPU and by the GPU, of the same elements in the same cuts.
void compare_packs(DType from, DType to, const Buffer& data, const std::vector<std::size_t>& cuts,
                   std::size_t skew, bool feedback, const Grid& grid) {
  const std::size_t count = data.size() / item_size(from);
  const Tensors tensors(from, data, cuts, skew);
  const std::vector<Source> sources = tensors.sources();
  std::vector<float> residuals[2];
  Buffer outs[2];
  Moved moved[2];
  for (int way = 0; way < 2; ++way) {
    residuals[way].resize(count + 1);
    for (std::size_t i = 0; i < count; ++i) residuals[way][i + 1] = 1e-3F * float(i % 11);
    outs[way].assign((count + skew) * item_size(to), std::byte{0xa5});
    const PackJob job{.tensors = sources,
                      .out = outs[way].data() + skew * item_size(to),
                      .from = from,
                      .to = to,
                      .scale = 1.0 / 3,
                      .residual = feedback ? residuals[way].data() + skew % 2 : nullptr};
    moved[way] = way == 0 ? pack(job) : pack_on_gpu(job, grid);
  }
  CHECK(outs[0] == outs[1]);
  CHECK(std::memcmp(residuals[0].data(), residuals[1].data(), residuals[0].size() * 4) == 0);
  CHECK(moved[0].read == moved[1].read);
  CHECK(moved[0].written == moved[1].written);
}

void compare_unpacks(DType from, DType to, const Buffer& data, const std::vector<std::size_t>& cuts,
                     int divisor, double factor, bool inspect, const Grid& grid,
                     std::size_t skew = 1) {
  const std::size_t count = data.size() / item_size(from);
  const Buffer nothing(count * item_size(to), std::byte{0xa5});
  Tensors tensors[2] = {Tensors(to, nothing, cuts, skew), Tensors(to, nothing, cuts, skew)};
  Unpacked found[2];
  for (int way = 0; way < 2; ++way) {
    const std::vector<Target> targets = tensors[way].targets();
    const UnpackJob job{.in = data.data(),
                        .tensors = targets,
                        .from = from,
                        .to = to,
                        .divisor = divisor,
                        .factor = factor,
                        .inspect = inspect};
    found[way] = way == 0 ? unpack(job) : unpack_on_gpu(job, grid);
  }
  CHECK(tensors[0].joined() == tensors[1].joined());
  CHECK(found[0].moved.read == found[1].moved.read);
  CHECK(found[0].moved.written == found[1].moved.written);
  CHECK(found[0].finite == found[1].finite);
  const bool both_nan = std::isnan(found[0].squares) && std::isnan(found[1].squares);
  CHECK((both_nan || std::bit_cast<std::uint64_t>(found[0].squares) ==
                         std::bit_cast<std::uint64_t>(found[1].squares)));
}

}  // namespace

TEST_CASE("GPU bucket: pack gives the CPU's bits and moves as many bytes") {
  for_each_pair([](DType from, DType to) {
    for (const std::size_t count : {0U, 1U, 7U, 1024U, 5000U}) {
      CAPTURE(count);
      const Buffer data = random_elements(from, count, 11);
      for (const Grid& grid : kGrids) {
        compare_packs(from, to, data, {count}, 0, false, grid);
        compare_packs(from, to, data, random_cuts(count, 3), 1, true, grid);
        for (const bool feedback : {false, true}) {  // most of it in whole groups
          compare_packs(from, to, data, {count / 2, count - count / 2}, 0, feedback, grid);
        }
      }
    }
  });
}

TEST_CASE("GPU bucket: unpack gives the CPU's bits and sums") {
  for_each_pair([](DType from, DType to) {
    for (const std::size_t count : {0U, 1U, 1023U, 1025U, 4096U, 9000U}) {
      CAPTURE(count);
      const Buffer data = tame_elements(from, count, 12);
      for (const Grid& grid : kGrids) {
        compare_unpacks(from, to, data, {count}, 1, 1.0, true, grid);
        compare_unpacks(from, to, data, random_cuts(count, 4), 3, 0.3, true, grid);
        compare_unpacks(from, to, data, random_cuts(count, 5), 2, 1.0, false, grid);
        for (const bool inspect : {false, true}) {
          const std::vector<std::size_t> halves{count / 2, count - count / 2};
          compare_unpacks(from, to, data, halves, 2, 1.0, inspect, grid, 0);
        }
      }
    }
  });
}

TEST_CASE("GPU bucket: any bits, and what is not finite is noticed") {
  for_each_pair([](DType from, DType to) {
    compare_unpacks(from, to, random_elements(from, 3000, 13), {3000}, 7, 1.0, true, {2, 3});
    for (const std::size_t at : {0U, 1023U, 1024U, 2999U}) {
      Buffer data = tame_elements(from, 3000, 14);
      write(from, data, at, -std::numeric_limits<double>::infinity());
      compare_unpacks(from, to, data, {3000}, 1, 1.0, true, {2, 3});
    }
  });
}

TEST_CASE("GPU bucket: sums of more blocks than columns, and squares beyond float64") {
  const Buffer data = tame_elements(DType::kBFloat16, 300'001, 15);
  compare_unpacks(DType::kBFloat16, DType::kFloat32, data, random_cuts(300'001, 6), 2, 1.0, true,
                  {3, 2});
  Buffer large(16);
  store(large, 0, 1e200);
  store(large, 1, 1.0);
  compare_unpacks(DType::kFloat64, DType::kFloat64, large, {2}, 1, 1.0, true, {1, 2});
}

TEST_CASE("GPU bucket: more tensors than a kernel has room for") {
  const std::size_t count = 9000;
  std::vector<std::size_t> ones(count, 1);
  std::vector<std::size_t> mixed;
  for (std::size_t rest = count; rest > 0; rest -= mixed.back()) {
    mixed.push_back(std::min<std::size_t>(rest, mixed.size() % 5));
  }
  for (const auto& cuts : {ones, mixed}) {
    REQUIRE(cuts.size() > std::size_t{gpu::kManyParts});
    const Buffer data = tame_elements(DType::kFloat32, count, 16);
    for (const bool listed : {false, true}) {
      CAPTURE(listed);
      compare_packs(DType::kFloat32, DType::kBFloat16, data, cuts, 0, true, {2, 3, listed});
      compare_unpacks(DType::kFloat32, DType::kFloat32, data, cuts, 3, 1.0, true, {2, 3, listed});
    }
  }
}

TEST_CASE("GPU bucket: a tensor may lie at its own place in the buffer") {
  const Buffer data = tame_elements(DType::kFloat32, 3000, 17);
  Buffer both[2] = {data, data};
  for (int way = 0; way < 2; ++way) {
    const Target tensors[] = {{both[way].data(), 1000}, {both[way].data() + 4000, 2000}};
    const UnpackJob job{.in = both[way].data(), .tensors = tensors, .divisor = 3};
    way == 0 ? unpack(job) : unpack_on_gpu(job, {2, 3});
  }
  CHECK(both[0] == both[1]);
}

}  // namespace dreamcomm::testing

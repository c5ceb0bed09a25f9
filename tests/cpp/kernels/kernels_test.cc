#include <array>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/half.h"
#include "cpp/support/naive_reduce.h"
#include "doctest.h"
#include "kernels/fold.h"
#include "kernels/operations.h"
#include "kernels/reduce.h"

using namespace dreamcomm;

namespace {

constexpr int kDTypes = 16;
constexpr int kOps = 10;
constexpr std::byte kGuard{0xa5};

using Buffer = std::vector<std::byte>;

/// Random bits: every kind of number, NaN with any payload, infinity, subnormal.
/// In every second element only a few, so that ties and large numbers meet.
Buffer random_bits(std::size_t bytes, std::size_t item, unsigned seed) {
  std::mt19937 random(seed);
  Buffer data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    const bool tame = item > 0 && (i / item) % 2 == 0 && i % item + 2 < item;
    data[i] = tame ? std::byte{0} : static_cast<std::byte>(random());
  }
  return data;
}

/// N inputs and an output of `count` elements at odd (element-aligned) places.
class Arrays {
 public:
  Arrays(DType dtype, std::size_t inputs, std::size_t count, unsigned seed)
      : item_(item_size(dtype)), count_(count), out_((count + 2) * item_, kGuard) {
    for (std::size_t k = 0; k < inputs; ++k) {
      const std::size_t shift = k % 3;
      in_.push_back(random_bits((count + shift) * item_, item_, seed + static_cast<unsigned>(k)));
      shift_.push_back(shift * item_);
    }
  }
  /// The inputs from `element` on.
  std::vector<const std::byte*> in(std::size_t element = 0) const {
    std::vector<const std::byte*> pointers;
    for (std::size_t k = 0; k < in_.size(); ++k) {
      pointers.push_back(in_[k].data() + shift_[k] + element * item_);
    }
    return pointers;
  }
  std::byte* writable_in(std::size_t k) { return in_[k].data() + shift_[k]; }
  std::byte* out(std::size_t element = 0) { return out_.data() + (element + 1) * item_; }
  /// The output, after a look at the element before it and the one after it.
  Buffer result() const {
    for (std::size_t i = 0; i < item_; ++i) {
      REQUIRE(out_[i] == kGuard);
      REQUIRE(out_[out_.size() - 1 - i] == kGuard);
    }
    return {out_.begin() + static_cast<std::ptrdiff_t>(item_),
            out_.end() - static_cast<std::ptrdiff_t>(item_)};
  }
  Buffer expected(const Reduction& how) const {
    Buffer out(count_ * item_);
    naive::reduce(how, in(), out.data(), count_);
    return out;
  }

 private:
  std::size_t item_;
  std::size_t count_;
  std::vector<Buffer> in_;
  std::vector<std::size_t> shift_;
  Buffer out_;
};

Reduction reduction(DType dtype, ReduceOp op) {
  return {.dtype = dtype, .op = op, .factor = 3.0, .divisor = 3};
}

template <typename Visit>
void for_each_defined(Visit visit) {
  for (int t = 0; t < kDTypes; ++t) {
    for (int o = 0; o < kOps; ++o) {
      const Reduction how = reduction(static_cast<DType>(t), static_cast<ReduceOp>(o));
      if (!is_defined(how.op, how.dtype)) continue;
      CAPTURE(name(how.dtype));
      CAPTURE(name(how.op));
      visit(how);
    }
  }
}

template <typename T>
std::vector<T> reduced(const Reduction& how, const std::vector<std::vector<T>>& in) {
  std::vector<const std::byte*> pointers;
  for (const auto& x : in) pointers.push_back(reinterpret_cast<const std::byte*>(x.data()));
  std::vector<T> out(in[0].size());
  reduce(how, pointers, reinterpret_cast<std::byte*>(out.data()), out.size());
  return out;
}

std::string message_of(const Reduction& how, kernels::Operands in, std::byte* out,
                       std::size_t count) {
  try {
    reduce(how, in, out, count);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kInvalid);
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("reduce: every operation on every type agrees with the naive one bit for bit") {
  int pairs = 0;
  for_each_defined([&](const Reduction& how) {
    ++pairs;
    for (const std::size_t inputs : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13}) {
      for (const std::size_t count : {1, 7, 133}) {
        CAPTURE(inputs);
        CAPTURE(count);
        Arrays arrays(how.dtype, inputs, count, static_cast<unsigned>(97 * inputs + count));
        reduce(how, arrays.in(), arrays.out(), count);
        CHECK(arrays.result() == arrays.expected(how));
      }
    }
  });
  CHECK(pairs == 8 * 9 + 4 * 6 + 7 + 2 * 4);
}

TEST_CASE("reduce: several blocks and many inputs") {
  for_each_defined([](const Reduction& how) {
    Arrays arrays(how.dtype, 64, 2 * 2048 + 5, 11);
    reduce(how, arrays.in(), arrays.out(), 2 * 2048 + 5);
    CHECK(arrays.result() == arrays.expected(how));
  });
}

TEST_CASE("reduce: equal bits however the arrays are cut") {
  for_each_defined([](const Reduction& how) {
    for (const std::size_t inputs : {1, 2, 3, 4, 7}) {
      CAPTURE(inputs);
      const std::size_t count = 2600;
      Arrays whole(how.dtype, inputs, count, 5);
      Arrays pieces(how.dtype, inputs, count, 5);
      reduce(how, whole.in(), whole.out(), count);
      const std::array<std::size_t, 7> cuts = {0, 1, 4, 37, 1062, 2599, count};
      for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
        reduce(how, pieces.in(cuts[c]), pieces.out(cuts[c]), cuts[c + 1] - cuts[c]);
      }
      CHECK(whole.result() == pieces.result());
    }
  });
}

TEST_CASE("reduce: the output may be any one of the inputs") {
  for_each_defined([](const Reduction& how) {
    const std::size_t count = 1100;
    for (const std::size_t inputs : {1, 2, 3, 5, 9}) {
      for (std::size_t k = 0; k < inputs; ++k) {
        CAPTURE(inputs);
        CAPTURE(k);
        Arrays arrays(how.dtype, inputs, count, 3);
        const Buffer expected = arrays.expected(how);
        reduce(how, arrays.in(), arrays.writable_in(k), count);
        CHECK(std::memcmp(arrays.in()[k], expected.data(), expected.size()) == 0);
      }
    }
  });
}

TEST_CASE("reduce: the plain loops give the bits of the machine's widest vectors") {
  const auto compare = [](DType dtype, ReduceOp op, const auto& kernel) {
    CAPTURE(name(dtype));
    const std::size_t count = 1500;
    for (const std::size_t inputs : {1, 2, 5}) {
      Arrays wide(dtype, inputs, count, 21);
      Arrays plain(dtype, inputs, count, 21);
      reduce(reduction(dtype, op), wide.in(), wide.out(), count);
      kernels::fold<4>(kernel, plain.in(), plain.out(), count);
      CHECK(wide.result() == plain.result());
    }
  };
  compare(DType::kFloat32, ReduceOp::kSum, kernels::Sum<kernels::Real<float>>());
  compare(DType::kFloat64, ReduceOp::kAvg, kernels::Average<kernels::Real<double>>(3));
  const Reduction by_three = reduction(DType::kFloat16, ReduceOp::kPremulSum);
  compare(DType::kFloat16, ReduceOp::kPremulSum, kernels::PremulSum<kernels::Float16>(by_three));
  compare(DType::kBFloat16, ReduceOp::kSum, kernels::Sum<kernels::BFloat16>());
  compare(DType::kFloat32, ReduceOp::kMin, kernels::Min<kernels::Real<float>>());
  compare(DType::kComplex64, ReduceOp::kProduct, kernels::ComplexProduct<float>());
}

TEST_CASE("reduce: 16-bit sums are rounded once, at the end") {
  // 256 + 1 is no bfloat16 and would round back to 256 at every step.
  std::vector<std::vector<std::uint16_t>> in;
  for (const float value : {256.0F, 1.0F, 1.0F}) in.push_back({float_to_bfloat16(value)});
  CHECK(bfloat16_to_float(reduced(reduction(DType::kBFloat16, ReduceOp::kSum), in)[0]) == 258.0F);
  in.clear();
  for (const float value : {2048.0F, 1.0F, 1.0F}) in.push_back({float_to_float16(value)});
  CHECK(float16_to_float(reduced(reduction(DType::kFloat16, ReduceOp::kSum), in)[0]) == 2050.0F);
}

TEST_CASE("reduce: operands are combined from left to right") {
  const std::vector<std::vector<float>> in = {{1e8F}, {1.0F}, {-1e8F}, {1.0F}, {1.0F}, {1.0F}};
  CHECK(reduced(reduction(DType::kFloat32, ReduceOp::kSum), in)[0] == 3.0F);
}

TEST_CASE("reduce: integers wrap, and averages truncate toward zero") {
  using I8 = std::vector<std::vector<std::int8_t>>;
  using U16 = std::vector<std::vector<std::uint16_t>>;
  using I32 = std::vector<std::vector<std::int32_t>>;
  CHECK(reduced(reduction(DType::kInt8, ReduceOp::kSum), I8{{127}, {1}})[0] == -128);
  CHECK(reduced(reduction(DType::kUInt16, ReduceOp::kProduct), U16{{65535}, {65535}})[0] == 1);
  CHECK(reduced(reduction(DType::kInt32, ReduceOp::kAvg), I32{{-3}, {-4}, {-1}})[0] == -2);
  CHECK(reduced(reduction(DType::kInt32, ReduceOp::kAvg), I32{{3}, {4}, {1}})[0] == 2);
  Reduction how = reduction(DType::kInt8, ReduceOp::kAvg);
  how.divisor = 300;  // more ranks than an int8 can count
  CHECK(reduced(how, I8{{100}, {20}})[0] == 0);
  how = reduction(DType::kInt8, ReduceOp::kPremulSum);
  how.factor = -2;
  CHECK(reduced(how, I8{{10}, {20}})[0] == -60);
}

TEST_CASE("reduce: MIN and MAX hand a NaN on from either side") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> in = {{nan, 1, 1, 3}, {1, nan, 2, 2}, {2, 2, nan, 1}};
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const std::vector<float> out = reduced(reduction(DType::kFloat32, op), in);
    for (const std::size_t i : {0, 1, 2}) CHECK(std::isnan(out[i]));
    CHECK(out[3] == (op == ReduceOp::kMin ? 1.0F : 3.0F));
  }
}

TEST_CASE("reduce: any byte but 0 is true, and results are 0 or 1") {
  const std::vector<std::vector<std::uint8_t>> in = {{0, 2, 4, 0}, {0, 0, 8, 16}};
  using Out = std::vector<std::uint8_t>;
  CHECK(reduced(reduction(DType::kBool, ReduceOp::kSum), in) == Out{0, 1, 1, 1});
  CHECK(reduced(reduction(DType::kBool, ReduceOp::kProduct), in) == Out{0, 0, 1, 0});
  CHECK(reduced(reduction(DType::kBool, ReduceOp::kBxor), in) == Out{0, 1, 0, 1});
}

TEST_CASE("reduce: complex numbers multiply as such and scale by component") {
  const std::vector<std::vector<std::complex<float>>> in = {{{1, 2}}, {{3, 4}}};
  const auto result = [&](ReduceOp op) { return reduced(reduction(DType::kComplex64, op), in)[0]; };
  CHECK(result(ReduceOp::kProduct) == std::complex<float>(-5, 10));
  CHECK(result(ReduceOp::kSum) == std::complex<float>(4, 6));
  CHECK(result(ReduceOp::kPremulSum) == std::complex<float>(12, 18));
  CHECK(result(ReduceOp::kAvg) == std::complex<float>(4.0F / 3, 2));
}

TEST_CASE("reduce: each input is multiplied by its own factor where they differ") {
  const std::vector<double> factors = {2, 3, 5, 7, 11, 13};
  std::vector<std::vector<float>> in;
  for (std::size_t n = 1; n <= factors.size(); ++n) {
    in.push_back({1.0F, static_cast<float>(n)});
    Reduction how = reduction(DType::kFloat32, ReduceOp::kPremulSum);
    how.factors = factors.data();
    float ones = 0;
    float numbers = 0;
    for (std::size_t i = 0; i < n; ++i) {
      ones += static_cast<float>(factors[i]);
      numbers += static_cast<float>(factors[i]) * static_cast<float>(i + 1);
    }
    CHECK(reduced(how, in) == std::vector<float>{ones, numbers});
  }
}

TEST_CASE("reduce: no elements, nothing touched") {
  const std::vector<const std::byte*> nowhere = {nullptr, nullptr};
  CHECK_NOTHROW(reduce(reduction(DType::kFloat32, ReduceOp::kSum), nowhere, nullptr, 0));
  CHECK_NOTHROW(reduce(reduction(DType::kFloat32, ReduceOp::kSum), {}, nullptr, 0));
}

TEST_CASE("reduce: what has no meaning is refused in words") {
  Arrays arrays(DType::kComplex128, 2, 1, 0);
  for (int t = 0; t < kDTypes; ++t) {
    for (int o = 0; o < kOps; ++o) {
      const Reduction how = reduction(static_cast<DType>(t), static_cast<ReduceOp>(o));
      if (is_defined(how.op, how.dtype)) continue;
      const std::string message = message_of(how, arrays.in(), arrays.out(), 1);
      CHECK(message.find(name(how.dtype)) != std::string::npos);
      CHECK(message.find(name(how.op)) != std::string::npos);
    }
  }
  Reduction how = reduction(DType::kFloat32, ReduceOp::kAvg);
  how.divisor = 0;
  CHECK(message_of(how, arrays.in(), arrays.out(), 1) ==
        "AVG divides by a number above 0, such as the number of ranks; got 0");
  CHECK(message_of(reduction(DType::kFloat32, ReduceOp::kSum), {}, arrays.out(), 1) ==
        "cannot reduce no inputs at all to 1 elements of float32");
}

TEST_CASE("reduce: along a tree neighbours are added, then their sums") {
  constexpr std::size_t kCount = 2500;  // more than two tiles
  for (const std::size_t inputs : {1U, 2U, 4U, 8U, 16U}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      std::mt19937 random(static_cast<unsigned>(inputs));
      std::normal_distribution<float> normal;
      std::vector<std::vector<float>> in(inputs, std::vector<float>(kCount));
      std::vector<const std::byte*> sources;
      for (std::vector<float>& one : in) {
        for (float& value : one) value = normal(random);
        sources.push_back(reinterpret_cast<const std::byte*>(one.data()));
      }
      std::vector<float> out(kCount);
      Reduction how = reduction(DType::kFloat32, op);
      how.along_tree = true;
      how.divisor = 3;
      reduce(how, sources, reinterpret_cast<std::byte*>(out.data()), kCount);
      for (std::size_t i = 0; i < kCount; ++i) {
        std::vector<float> sums;
        for (const std::vector<float>& one : in) sums.push_back(one[i]);
        for (; sums.size() > 1; sums.resize(sums.size() / 2)) {
          for (std::size_t k = 0; 2 * k + 1 < sums.size(); ++k)
            sums[k] = sums[2 * k] + sums[2 * k + 1];
        }
        REQUIRE(out[i] == (op == ReduceOp::kAvg ? sums[0] / 3.0F : sums[0]));
      }
    }
  }
}

TEST_CASE("reduce: what cannot be added along a tree is refused") {
  Arrays arrays(DType::kFloat64, 4, 1, 0);
  for (const auto& [dtype, op] :
       {std::pair(DType::kBFloat16, ReduceOp::kSum), std::pair(DType::kFloat32, ReduceOp::kMax)}) {
    Reduction how = reduction(dtype, op);
    how.along_tree = true;
    const std::string message = message_of(how, arrays.in(), arrays.out(), 1);
    CHECK(message.find("only sums and averages of float32 and float64") != std::string::npos);
  }
  Arrays three(DType::kFloat32, 3, 1, 0);
  Reduction how = reduction(DType::kFloat32, ReduceOp::kSum);
  how.along_tree = true;
  CHECK(message_of(how, three.in(), three.out(), 1).find("a power of two of ranks") !=
        std::string::npos);
}

TEST_CASE("reduce: a factor that the integer type cannot hold is refused") {
  Arrays arrays(DType::kInt64, 2, 1, 0);
  const auto refused = [&](DType dtype, double factor) {
    Reduction how = reduction(dtype, ReduceOp::kPremulSum);
    how.factor = factor;
    return message_of(how, arrays.in(), arrays.out(), 1) != "no error";
  };
  CHECK_FALSE(refused(DType::kUInt8, 255));
  CHECK(refused(DType::kUInt8, 2.5));
  CHECK(refused(DType::kUInt8, 256));
  CHECK(refused(DType::kUInt8, -1));
  CHECK_FALSE(refused(DType::kInt8, -128));
  CHECK(refused(DType::kInt8, -129));
  CHECK_FALSE(refused(DType::kInt64, -0x1p63));
  CHECK(refused(DType::kInt64, 0x1p63));
  CHECK(refused(DType::kUInt64, 0x1p64));
  CHECK(refused(DType::kInt32, std::numeric_limits<double>::quiet_NaN()));
}

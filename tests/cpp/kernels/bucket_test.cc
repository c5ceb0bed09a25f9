#include "kernels/bucket.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/error.h"
#include "cpp/support/buckets.h"

using namespace dreamcomm;
using namespace dreamcomm::testing;

namespace {

bool in_double(DType from, DType to) { return from == DType::kFloat64 || to == DType::kFloat64; }

/// One operation after another, each rounded to the type that is computed in.
double scaled(DType from, DType to, double x, double scale, double divisor, double residual) {
  if (in_double(from, to)) {
    const volatile double product = x / divisor * scale;
    return residual == 0 ? product : product + residual;
  }
  const volatile float quotient = float(x) / float(divisor);
  const volatile float product = quotient * float(scale);
  return residual == 0 ? product : product + float(residual);
}

Buffer packed(DType from, DType to, const Buffer& data, const std::vector<std::size_t>& counts,
              double scale, std::vector<float>* residual = nullptr) {
  const std::size_t count = data.size() / item_size(from);
  const Tensors tensors(from, data, counts);
  const std::vector<Source> sources = tensors.sources();
  Buffer out((count + 1) * item_size(to));  // begins at the second element
  const Moved moved = pack({.tensors = sources,
                            .out = out.data() + item_size(to),
                            .from = from,
                            .to = to,
                            .scale = scale,
                            .residual = residual == nullptr ? nullptr : residual->data()});
  const std::size_t carried = residual == nullptr ? 0 : 4;
  CHECK(moved.read == count * (item_size(from) + carried));
  CHECK(moved.written == count * (item_size(to) + carried));
  return {out.begin() + static_cast<std::ptrdiff_t>(item_size(to)), out.end()};
}

struct Result {
  Buffer data;
  Unpacked unpacked;
};

Result unpacked(DType from, DType to, const Buffer& in, const std::vector<std::size_t>& counts,
                int divisor, double factor, bool inspect) {
  Tensors tensors(to, Buffer(in.size() / item_size(from) * item_size(to)), counts);
  const std::vector<Target> targets = tensors.targets();
  const Unpacked result = unpack({.in = in.data(),
                                  .tensors = targets,
                                  .from = from,
                                  .to = to,
                                  .divisor = divisor,
                                  .factor = factor,
                                  .inspect = inspect});
  return {tensors.joined(), result};
}

/// As inspector.h says it.
double naive_squares(DType type, const Buffer& data) {
  const std::size_t count = data.size() / item_size(type);
  std::vector<double> columns(256);
  for (std::size_t begin = 0; begin < count; begin += 1024) {
    double lanes[16] = {};
    for (std::size_t i = begin; i < std::min(begin + 1024, count); ++i) {
      const volatile double square = read(type, data, i) * read(type, data, i);
      lanes[i % 16] += square;
    }
    for (const std::size_t half : {8U, 4U, 2U, 1U}) {
      for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    columns[begin / 1024 % 256] += lanes[0];
  }
  for (std::size_t half = 128; half > 0; half /= 2) {
    for (std::size_t c = 0; c < half; ++c) columns[c] += columns[c + half];
  }
  return columns[0];
}

}  // namespace

TEST_CASE("bucket: pack scales and rounds once, for all pairs of types") {
  for_each_pair([](DType from, DType to) {
    for (const std::size_t count : kCounts) {
      CAPTURE(count);
      const Buffer data = random_elements(from, count, 1);
      for (const double scale : {1.0, 0.5, -3.0, 1.0 / 3}) {
        Buffer expected(count * item_size(to));
        for (std::size_t i = 0; i < count; ++i) {
          write(to, expected, i, scaled(from, to, read(from, data, i), scale, 1, 0));
        }
        CHECK(packed(from, to, data, {count}, scale) == expected);
      }
    }
  });
}

TEST_CASE("bucket: unpack divides and rounds once, for all pairs of types") {
  for_each_pair([](DType from, DType to) {
    for (const int divisor : {1, 2, 3, 7}) {
      for (const double factor : {1.0, 0.3}) {
        const std::size_t count = 1500;
        const Buffer data = random_elements(from, count, 2);
        Buffer expected(count * item_size(to));
        for (std::size_t i = 0; i < count; ++i) {
          write(to, expected, i, scaled(from, to, read(from, data, i), factor, divisor, 0));
        }
        const Result found = unpacked(from, to, data, {count}, divisor, factor, false);
        CHECK(found.data == expected);
        CHECK(found.unpacked.moved.read == count * item_size(from));
        CHECK(found.unpacked.moved.written == count * item_size(to));
      }
    }
  });
}

TEST_CASE("bucket: float64 rounds to 16 bits in one step, also near ties") {
  // Just beside the middle of two neighbours, where a step over float32 would tie.
  const std::vector<double> values = {1 + 0x1p-8 + 0x1p-40,
                                      1 + 0x1p-8 - 0x1p-40,
                                      1 + 0x1p-11 + 0x1p-40,
                                      1 + 0x1p-11 - 0x1p-40,
                                      -1 - 0x3p-8 + 0x1p-45,
                                      0x1p-25 + 0x1p-70,
                                      0x1p-134 + 0x1p-190,
                                      1e300,
                                      0x1.fep127 + 0x1p119,
                                      65519.999999,
                                      65520.0,
                                      0x1p-1074};
  Buffer data(values.size() * sizeof(double));
  for (std::size_t i = 0; i < values.size(); ++i) store(data, i, values[i]);
  for (const DType to : {DType::kBFloat16, DType::kFloat16}) {
    Buffer expected(values.size() * 2);
    for (std::size_t i = 0; i < values.size(); ++i) write(to, expected, i, values[i]);
    CHECK(packed(DType::kFloat64, to, data, {values.size()}, 1.0) == expected);
  }
}

TEST_CASE("bucket: cuts into tensors change no bit, many empty and tiny ones neither") {
  for_each_pair([](DType from, DType to) {
    const std::size_t count = 4321;
    const Buffer data = random_elements(from, count, 3);
    const Buffer whole = packed(from, to, data, {count}, 0.7);
    const Result apart = unpacked(from, to, data, {count}, 3, 1.0, true);
    for (unsigned seed = 0; seed < 5; ++seed) {
      const std::vector<std::size_t> cuts = random_cuts(count, seed);
      CHECK(packed(from, to, data, cuts, 0.7) == whole);
      const Result found = unpacked(from, to, data, cuts, 3, 1.0, true);
      CHECK(found.data == apart.data);
      CHECK(std::bit_cast<std::uint64_t>(found.unpacked.squares) ==
            std::bit_cast<std::uint64_t>(apart.unpacked.squares));
    }
  });
}

TEST_CASE("bucket: the residual takes what rounding took away") {
  for_each_pair([](DType from, DType to) {
    const std::size_t count = 1300;
    const Buffer data = tame_elements(from, count, 4);
    std::vector<float> residual(count);
    for (std::size_t i = 0; i < count; ++i) residual[i] = 1e-3F * static_cast<float>(i % 11);
    Buffer expected(count * item_size(to));
    std::vector<float> left(count);
    for (std::size_t i = 0; i < count; ++i) {
      const double value = scaled(from, to, read(from, data, i), 0.3, 1, residual[i]);
      write(to, expected, i, value);
      left[i] = static_cast<float>(value - read(to, expected, i));
    }
    std::vector<float> cut = residual;
    CHECK(packed(from, to, data, {count}, 0.3, &residual) == expected);
    CHECK(residual == left);
    CHECK(packed(from, to, data, random_cuts(count, 5), 0.3, &cut) == expected);
    CHECK(cut == left);
  });
}

TEST_CASE("bucket: a value that is not finite, or not when rounded, leaves no residual") {
  const double inf = std::numeric_limits<double>::infinity();
  for_each_pair([&](DType from, DType to) {
    const std::vector<double> values = {inf, -inf, std::nan(""), 60000.0, 1.5};
    Buffer data(values.size() * item_size(from));
    for (std::size_t i = 0; i < values.size(); ++i) write(from, data, i, values[i]);
    std::vector<float> residual(values.size(), 0.0F);
    const Buffer out = packed(from, to, data, {values.size()}, 1e3, &residual);
    CHECK(read(to, out, 0) == inf);
    CHECK(read(to, out, 1) == -inf);
    CHECK(std::isnan(read(to, out, 2)));
    for (const float left : residual) CHECK(std::isfinite(left));
    for (std::size_t i = 0; i < 3; ++i) CHECK(residual[i] == 0.0F);
    if (to == DType::kFloat16) CHECK(residual[3] == 0.0F);
  });
}

TEST_CASE("bucket: every NaN is written as the quiet one") {
  const std::uint32_t patterns[] = {0x7f800001, 0xff800001, 0x7fc12345, 0xffc00000};
  Buffer data(sizeof patterns);
  std::memcpy(data.data(), patterns, sizeof patterns);
  const auto bits_of = [&](DType to) { return packed(DType::kFloat32, to, data, {4}, 1.0); };
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(load<std::uint32_t>(bits_of(DType::kFloat32), i) == 0x7fc00000);
    CHECK(load<std::uint64_t>(bits_of(DType::kFloat64), i) == 0x7ff8000000000000);
    CHECK(load<std::uint16_t>(bits_of(DType::kBFloat16), i) == 0x7fc0);
    CHECK(load<std::uint16_t>(bits_of(DType::kFloat16), i) == 0x7e00);
  }
}

TEST_CASE("bucket: the sum of squares is added in the order that is promised") {
  for_each_pair([](DType from, DType to) {
    std::vector<std::size_t> counts(std::begin(kCounts), std::end(kCounts));
    counts.push_back(300'000);  // more blocks than columns
    for (const std::size_t count : counts) {
      CAPTURE(count);
      const Buffer data = tame_elements(from, count, 6);
      const Result found = unpacked(from, to, data, {count}, 3, 1.0, true);
      CHECK(found.unpacked.squares == naive_squares(to, found.data));
      CHECK(found.unpacked.finite);
    }
  });
}

TEST_CASE("bucket: one element that is not finite is noticed wherever it is") {
  for_each_pair([](DType from, DType to) {
    for (const std::size_t at : {0U, 17U, 1023U, 1024U, 2999U}) {
      for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
        Buffer data = tame_elements(from, 3000, 7);
        write(from, data, at, bad);
        CHECK_FALSE(unpacked(from, to, data, {3000}, 1, 1.0, true).unpacked.finite);
      }
    }
  });
}

TEST_CASE("bucket: large finite float64 numbers stay finite though their squares do not") {
  Buffer data(16);
  store(data, 0, 1e200);
  store(data, 1, 1.0);
  const Unpacked found =
      unpacked(DType::kFloat64, DType::kFloat64, data, {2}, 1, 1.0, true).unpacked;
  CHECK(found.finite);
  CHECK(std::isinf(found.squares));
}

TEST_CASE("bucket: a tensor may lie at its own place in the buffer") {
  const std::size_t count = 3000;
  const Buffer data = random_elements(DType::kFloat32, count, 8);
  Buffer both = data;
  const Target whole[] = {{both.data(), 1000}, {both.data() + 4000, 2000}};
  const Unpacked found =
      unpack({.in = both.data(), .tensors = whole, .divisor = 3, .inspect = true});
  const Result apart = unpacked(DType::kFloat32, DType::kFloat32, data, {count}, 3, 1.0, true);
  CHECK(both == apart.data);
  CHECK(found.finite == apart.unpacked.finite);
}

TEST_CASE("bucket: unsupported types and divisors are refused") {
  const auto message = [](auto call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kInvalid);
      return error.what();
    }
    return "no error";
  };
  const std::string types = "expected elements of type float32, float64, bfloat16 or float16, got ";
  CHECK(message([] { pack({.from = DType::kInt32}); }) == types + "int32");
  CHECK(message([] { unpack({.to = DType::kComplex64}); }) == types + "complex64");
  CHECK(message([] { unpack({.divisor = 0}); }) == "expected a divisor of at least 1, got 0");
}

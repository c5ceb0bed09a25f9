#include "core/half.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "doctest.h"

using namespace dreamcomm;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

static_assert(float_to_bfloat16(1.0F) == 0x3f80);
static_assert(bfloat16_to_float(0xc000) == -2.0F);
static_assert(float_to_float16(1.0F) == 0x3c00);
static_assert(float16_to_float(0xc000) == -2.0F);

/// A binary format: sign, `exponent_bits`, `mantissa_bits`.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  }
};
constexpr Format kFloat16{5, 10};
constexpr Format kBFloat16{8, 7};

/// The value of non-negative finite `bits`, by the definition of the format.
double value(Format format, std::uint16_t bits) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int exponent = bits >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int whole = exponent == 0 ? mantissa : mantissa + (1 << format.mantissa_bits);
  return std::ldexp(whole, (exponent == 0 ? 1 : exponent) - bias - format.mantissa_bits);
}

using Read = float (*)(std::uint16_t);
using Write = std::uint16_t (*)(float);

/// Every number of the format, and around each midpoint of two neighbours the
/// float32 below it, at it and above it.
void check_format(Format format, Read read, Write write) {
  std::size_t wrong = 0;
  const auto expect = [&](float from, int to) {
    const auto negative = static_cast<std::uint16_t>(to | 0x8000);
    wrong += write(from) == to && write(-from) == negative ? 0 : 1;
  };
  for (std::uint16_t bits = 0; bits < format.infinity(); ++bits) {
    const auto exact = static_cast<float>(value(format, bits));
    const auto negative = static_cast<std::uint16_t>(bits | 0x8000);
    wrong += std::bit_cast<std::uint32_t>(read(bits)) == std::bit_cast<std::uint32_t>(exact) &&
                     read(negative) == -exact && std::signbit(read(negative))
                 ? 0
                 : 1;
    expect(exact, bits);
    // Past the largest number infinity stands where the next one would.
    const double step = bits + 1 < format.infinity()
                            ? value(format, bits + 1) - value(format, bits)
                            : value(format, bits) - value(format, bits - 1);
    const auto middle = static_cast<float>(value(format, bits) + step / 2);
    expect(middle, bits % 2 == 0 ? bits : bits + 1);
    expect(std::nextafter(middle, 0.0F), bits);
    expect(std::nextafter(middle, kInf), bits + 1);
  }
  CHECK(wrong == 0);
}

void check_special(Format format, Read read, Write write) {
  const std::uint16_t infinity = format.infinity();
  CHECK(read(infinity) == kInf);
  CHECK(read(infinity | 0x8000) == -kInf);
  CHECK(write(kInf) == infinity);
  CHECK(write(-kInf) == (infinity | 0x8000));
  CHECK(write(std::numeric_limits<float>::max()) == infinity);
  CHECK(write(std::numeric_limits<float>::denorm_min()) == 0);
  CHECK(write(-std::numeric_limits<float>::denorm_min()) == 0x8000);
  const int quiet = infinity | (1 << (format.mantissa_bits - 1));
  for (const std::uint32_t nan : {0x7f800001U, 0x7fffffffU, 0xff800001U, 0x7fc00000U}) {
    CHECK(write(std::bit_cast<float>(nan)) == quiet);
  }
  CHECK(write(kNan) == quiet);
  std::size_t lost = 0;
  for (int bits = infinity + 1; bits < 0x8000; ++bits) {
    lost += std::isnan(read(static_cast<std::uint16_t>(bits))) ? 0 : 1;
    lost += std::isnan(read(static_cast<std::uint16_t>(bits | 0x8000))) ? 0 : 1;
  }
  CHECK(lost == 0);
}

}  // namespace

TEST_CASE("float16: every number, and rounding to nearest even between any two") {
  check_format(kFloat16, float16_to_float, float_to_float16);
}

TEST_CASE("bfloat16: every number, and rounding to nearest even between any two") {
  check_format(kBFloat16, bfloat16_to_float, float_to_bfloat16);
}

TEST_CASE("float16: infinity, NaN, overflow, underflow") {
  check_special(kFloat16, float16_to_float, float_to_float16);
  CHECK(float_to_float16(65519.996F) == 0x7bff);  // the last that does not overflow
  CHECK(float_to_float16(65520.0F) == 0x7c00);
}

TEST_CASE("bfloat16: infinity, NaN, overflow, underflow") {
  check_special(kBFloat16, bfloat16_to_float, float_to_bfloat16);
}

TEST_CASE("half: an array gives the bits its elements give one by one") {
  std::vector<std::uint16_t> all(65536);
  std::vector<std::uint16_t> narrow(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  for (std::size_t i = 0; i < all.size(); ++i) {
    narrow[i] = float_to_float16(float16_to_float(all[i]));
  }
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool is_nan = (i & 0x7fff) > 0x7c00;
    wrong += narrow[i] == (is_nan ? 0x7e00 : all[i]) ? 0 : 1;
  }
  CHECK(wrong == 0);
}

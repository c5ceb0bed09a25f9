// float16 and bfloat16 as bit patterns, to float32 and back. Pure, and without
// branches, so that loops over them vectorise. They hold under the default
// rounding mode, also where a thread flushes subnormal float32 to zero.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

namespace dreamcomm {

static_assert(std::numeric_limits<float>::is_iec559, "float must be IEEE 754 binary32");

/// Exact.
constexpr float bfloat16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

/// Rounds to nearest, ties to even; overflows to infinity. Any NaN becomes the
/// positive quiet NaN 0x7fc0.
constexpr std::uint16_t float_to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t to_nearest_even = 0x7fffU + ((bits >> 16) & 1U);
  const std::uint32_t rounded = (bits + to_nearest_even) >> 16;
  return static_cast<std::uint16_t>(value != value ? 0x7fc0U : rounded);
}

/// Rounds to odd: toward zero, and the last bit set if that is not exact. A later
/// rounding to 16 bits then gives the same as if the value had been rounded once (Boldo
/// and Melquiond, 2008).
constexpr float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto back = static_cast<double>(nearest);
  const bool exact = back == value || value != value;
  const bool away = value > 0 ? back > value : back < value;
  const std::uint32_t step = !exact && away ? 1 : 0;
  const std::uint32_t odd = exact ? 0 : 1;
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(nearest) - step) | odd);
}

/// Exact.
constexpr float float16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t magnitude = bits & 0x7fffU;
  // Exponent and mantissa are moved to float32's fields. Shifting up by 224 and scaling down by
  // 2^-112 gives float32's bias. Infinity and NaN then have exponent 255, which the scaling does
  // not change.
  const auto normal = std::bit_cast<std::uint32_t>(
      std::bit_cast<float>((magnitude << 13) + (224U << 23)) * 0x1p-112F);
  // The mantissa of a subnormal, in units of 2^-24, put below 0.5's own.
  const auto subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude | (126U << 23)) - 0.5F);
  // A mask, not `?:`: the compiler would move the arithmetic into branches.
  const std::uint32_t is_subnormal = 0U - std::uint32_t{(magnitude >> 10) == 0};
  return std::bit_cast<float>(sign | (subnormal & is_subnormal) | (normal & ~is_subnormal));
}

/// Rounds to nearest, ties to even; overflows to infinity. Any NaN becomes the
/// positive quiet NaN 0x7e00.
constexpr std::uint16_t float_to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  // Scaled by 4 in all; what float16 cannot hold passes through infinity.
  const float scaled = std::bit_cast<float>(bits & 0x7fffffffU) * 0x1p+112F * 0x1p-110F;
  // The addition of a power of two 2^15 times larger (and for subnormals the
  // least such) leaves float16's mantissa bits at the end of float32's: rounded.
  const auto exponent = static_cast<std::int32_t>(bits & 0x7f800000U);
  const auto power = static_cast<std::uint32_t>(std::max(exponent, 113 << 23)) + (15U << 23);
  const auto rounded = std::bit_cast<std::uint32_t>(std::bit_cast<float>(power) + scaled);
  const std::uint32_t number = ((rounded >> 13) & 0x7c00U) + (rounded & 0xfffU);
  const std::uint32_t is_nan = 0U - std::uint32_t{value != value};
  return static_cast<std::uint16_t>((0x7e00U & is_nan) | ((sign | number) & ~is_nan));
}

}  // namespace dreamcomm

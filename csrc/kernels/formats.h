// How elements are read, computed with and written.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/half.h"

namespace dreamcomm::kernels {

/// Integers wrap: sums and products are those of unsigned numbers.
template <typename T>
struct Integer {
  using Element = T;
  using Accumulator = T;
  // At least as wide as unsigned, or small types would be promoted to int.
  using Modular = std::common_type_t<std::make_unsigned_t<T>, unsigned>;

  static constexpr T read(T element) { return element; }
  static constexpr T write(T value) { return value; }
  static constexpr T add(T a, T b) {
    return static_cast<T>(static_cast<Modular>(a) + static_cast<Modular>(b));
  }
  static constexpr T multiply(T a, T b) {
    return static_cast<T>(static_cast<Modular>(a) * static_cast<Modular>(b));
  }
  template <typename Number>
  static constexpr T divide(T a, Number divisor) {
    using Wide = std::common_type_t<T, int>;  // a divisor > 0 fits, so nothing overflows
    return static_cast<T>(static_cast<Wide>(a) / static_cast<Wide>(divisor));
  }
};

/// Arithmetic in the floating-point type T.
template <typename T>
struct Arithmetic {
  static constexpr T add(T a, T b) { return a + b; }
  static constexpr T multiply(T a, T b) { return a * b; }
  template <typename Number>
  static constexpr T divide(T a, Number divisor) {
    return a / static_cast<T>(divisor);
  }
};

/// float32 and float64. The NaN that a sum of two NaNs gives depends on the order of the machine's
/// operands, so every NaN is written as the same one.
template <typename T>
struct Real : Arithmetic<T> {
  using Element = T;
  using Accumulator = T;
  static constexpr T read(T element) { return element; }
  static constexpr T write(T value) {
    return value != value ? std::numeric_limits<T>::quiet_NaN() : value;
  }
};

struct Float16 : Arithmetic<float> {
  using Element = std::uint16_t;
  using Accumulator = float;
  static constexpr float read(Element element) { return float16_to_float(element); }
  static constexpr Element write(float value) { return float_to_float16(value); }
};

struct BFloat16 : Arithmetic<float> {
  using Element = std::uint16_t;
  using Accumulator = float;
  static constexpr float read(Element element) { return bfloat16_to_float(element); }
  static constexpr Element write(float value) { return float_to_bfloat16(value); }
};

/// The part of `sent` that sending `value` leaves to be sent the next time.
template <typename A>
constexpr float left_over(A value, A sent) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const auto left = static_cast<float>(value - sent);
  return left >= -kMost && left <= kMost ? left : 0.0F;
}

}  // namespace dreamcomm::kernels

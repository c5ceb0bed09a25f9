// The expected results of reduce(), one element at a time and without regard to speed.
#pragma once

#include <bit>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "core/half.h"
#include "core/types.h"

namespace dreamcomm::naive {

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

/// Through memory, so that no compiler fuses it with the next operation.
template <typename T>
T rounded(T value) {
  volatile T stored = value;
  return stored;
}

/// Modulo 2^64, cut to T at the end: the same as modulo T's own range.
template <typename T>
T fold_integers(const Reduction& how, const std::vector<T>& x) {
  const auto wide = [](T value) { return static_cast<std::uint64_t>(value); };
  std::uint64_t sum = 0;
  std::uint64_t scaled = 0;
  std::uint64_t product = 1;
  T least = x[0];
  T most = x[0];
  T all = x[0];
  T any = x[0];
  T odd = 0;
  for (const T value : x) {
    sum += wide(value);
    if (how.op == ReduceOp::kPremulSum) scaled += wide(value) * wide(static_cast<T>(how.factor));
    product *= wide(value);
    least = value < least ? value : least;
    most = value > most ? value : most;
    all = static_cast<T>(all & value);
    any = static_cast<T>(any | value);
    odd = static_cast<T>(odd ^ value);
  }
  switch (how.op) {
    case ReduceOp::kSum:
      return static_cast<T>(sum);
    case ReduceOp::kAvg:
      if (std::is_signed_v<T>) {
        return static_cast<T>(static_cast<std::int64_t>(static_cast<T>(sum)) /
                              static_cast<int>(how.divisor));
      }
      return static_cast<T>(wide(static_cast<T>(sum)) / static_cast<std::uint64_t>(how.divisor));
    case ReduceOp::kPremulSum:
      return static_cast<T>(scaled);
    case ReduceOp::kProduct:
      return static_cast<T>(product);
    case ReduceOp::kMin:
      return least;
    case ReduceOp::kMax:
      return most;
    case ReduceOp::kBand:
      return all;
    case ReduceOp::kBor:
      return any;
    case ReduceOp::kBxor:
      return odd;
    case ReduceOp::kNone:
      break;
  }
  throw std::logic_error("no such operation");
}

template <typename T>
T step(const Reduction& how, T left, T right) {
  switch (how.op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return rounded(left + right);
    case ReduceOp::kProduct:
      return rounded(left * right);
    case ReduceOp::kMin:
      if (std::isnan(left) || std::isnan(right)) return std::numeric_limits<T>::quiet_NaN();
      return right < left ? right : left;
    case ReduceOp::kMax:
      if (std::isnan(left) || std::isnan(right)) return std::numeric_limits<T>::quiet_NaN();
      return right > left ? right : left;
    default:
      throw std::logic_error("no such operation");
  }
}

template <typename T>
T fold_reals(const Reduction& how, std::vector<T> x) {
  if (how.op == ReduceOp::kPremulSum) {
    for (T& value : x) value = rounded(value * static_cast<T>(how.factor));
  }
  T result = x[0];
  for (std::size_t k = 1; k < x.size(); ++k) result = step(how, result, x[k]);
  if (how.op == ReduceOp::kAvg) result = rounded(result / static_cast<T>(how.divisor));
  return std::isnan(result) ? std::numeric_limits<T>::quiet_NaN() : result;
}

template <typename T>
std::complex<T> fold_complex(const Reduction& how, const std::vector<std::complex<T>>& x) {
  std::vector<T> real;
  std::vector<T> imaginary;
  for (const auto& value : x) {
    real.push_back(value.real());
    imaginary.push_back(value.imag());
  }
  if (how.op != ReduceOp::kProduct) {
    return {fold_reals(how, real), fold_reals(how, imaginary)};
  }
  T a = real[0];
  T b = imaginary[0];
  for (std::size_t k = 1; k < x.size(); ++k) {
    const T c = real[k];
    const T d = imaginary[k];
    const T next = rounded(rounded(a * c) - rounded(b * d));
    b = rounded(rounded(a * d) + rounded(b * c));
    a = next;
  }
  const T nan = std::numeric_limits<T>::quiet_NaN();
  return {std::isnan(a) ? nan : a, std::isnan(b) ? nan : b};
}

inline std::uint8_t fold_bools(const Reduction& how, const std::vector<std::uint8_t>& x) {
  std::size_t trues = 0;
  for (const std::uint8_t value : x) trues += value != 0 ? 1 : 0;
  switch (how.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor:
      return trues > 0 ? 1 : 0;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return trues == x.size() ? 1 : 0;
    case ReduceOp::kBxor:
      return trues % 2 == 1 ? 1 : 0;
    default:
      throw std::logic_error("no such operation");
  }
}

/// Element `i` of every input through `fold`, written to element `i` of `out`.
template <typename T, typename Fold>
void each(const std::vector<const std::byte*>& in, std::byte* out, std::size_t count, Fold fold) {
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<T> operands;
    for (const std::byte* input : in) operands.push_back(load<T>(input + i * sizeof(T)));
    const T result = fold(operands);
    std::memcpy(out + i * sizeof(T), &result, sizeof(T));
  }
}

template <typename Read, typename Write>
std::uint16_t fold_halves(const Reduction& how, const std::vector<std::uint16_t>& x, Read read,
                          Write write) {
  std::vector<float> wide;
  for (const std::uint16_t value : x) wide.push_back(read(value));
  return write(fold_reals(how, wide));
}

inline void reduce(const Reduction& how, const std::vector<const std::byte*>& in, std::byte* out,
                   std::size_t count) {
  const auto integers = [&]<typename T>(T /*type*/) {
    each<T>(in, out, count, [&](const auto& x) { return fold_integers(how, x); });
  };
  const auto reals = [&]<typename T>(T /*type*/) {
    each<T>(in, out, count, [&](const auto& x) { return fold_reals(how, x); });
  };
  const auto complexes = [&]<typename T>(T /*type*/) {
    each<std::complex<T>>(in, out, count, [&](const auto& x) { return fold_complex(how, x); });
  };
  const auto halves = [&](auto read, auto write) {
    each<std::uint16_t>(in, out, count,
                        [&](const auto& x) { return fold_halves(how, x, read, write); });
  };
  switch (how.dtype) {
    case DType::kUInt8:
      return integers(std::uint8_t{});
    case DType::kInt8:
      return integers(std::int8_t{});
    case DType::kUInt16:
      return integers(std::uint16_t{});
    case DType::kInt16:
      return integers(std::int16_t{});
    case DType::kUInt32:
      return integers(std::uint32_t{});
    case DType::kInt32:
      return integers(std::int32_t{});
    case DType::kUInt64:
      return integers(std::uint64_t{});
    case DType::kInt64:
      return integers(std::int64_t{});
    case DType::kFloat16:
      return halves(float16_to_float, float_to_float16);
    case DType::kBFloat16:
      return halves(bfloat16_to_float, float_to_bfloat16);
    case DType::kFloat32:
      return reals(float{});
    case DType::kFloat64:
      return reals(double{});
    case DType::kBool:
      return each<std::uint8_t>(in, out, count, [&](const auto& x) { return fold_bools(how, x); });
    case DType::kComplex64:
      return complexes(float{});
    case DType::kComplex128:
      return complexes(double{});
    default:  // only moves
      break;
  }
  throw std::logic_error("no such type");
}

}  // namespace dreamcomm::naive

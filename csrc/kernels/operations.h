// The kernels that fold() takes, over the formats of formats.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"
#include "kernels/formats.h"

namespace dreamcomm::kernels {

template <typename F>
struct Sum {
  using Element = typename F::Element;
  using Accumulator = typename F::Accumulator;
  constexpr Accumulator first(Element x) const { return F::read(x); }
  constexpr Accumulator next(Accumulator left, Element x) const { return F::add(left, F::read(x)); }
  constexpr Element last(Accumulator sum) const { return F::write(sum); }
};

template <typename F>
struct Average : Sum<F> {
  using typename Sum<F>::Element;
  using typename Sum<F>::Accumulator;
  explicit Average(double by) : divisor(by) {}
  constexpr Element last(Accumulator sum) const { return F::write(F::divide(sum, divisor)); }
  double divisor;
};

template <typename F>
struct PremulSum : Sum<F> {
  using typename Sum<F>::Element;
  using typename Sum<F>::Accumulator;
  explicit PremulSum(const Reduction& how) : by(how) {}
  constexpr Accumulator factor(std::size_t operand) const {
    return static_cast<Accumulator>(by.factors != nullptr ? by.factors[operand] : by.factor);
  }
  constexpr Accumulator first(Element x, Accumulator by_this) const {
    return F::multiply(F::read(x), by_this);
  }
  constexpr Accumulator next(Accumulator left, Element x, Accumulator by_this) const {
    return F::add(left, first(x, by_this));
  }
  const Reduction& by;
};

template <typename F>
struct Product : Sum<F> {
  using typename Sum<F>::Element;
  using typename Sum<F>::Accumulator;
  constexpr Accumulator next(Accumulator left, Element x) const {
    return F::multiply(left, F::read(x));
  }
};

/// MIN, or MAX. A NaN on either side wins; of equal ones the left stays.
template <typename F, bool kLess>
struct Extreme : Sum<F> {
  using typename Sum<F>::Element;
  using typename Sum<F>::Accumulator;
  constexpr Accumulator next(Accumulator left, Element x) const {
    const Accumulator right = F::read(x);
    // One choice after the other: of nested ones the compiler makes branches.
    const Accumulator better = (kLess ? right < left : right > left) ? right : left;
    return right != right ? right : better;  // a NaN on the left was never less or greater
  }
};
template <typename F>
using Min = Extreme<F, true>;
template <typename F>
using Max = Extreme<F, false>;

/// Bytes, as they are or (of booleans, kTruth) as 0 and 1.
template <bool kTruth>
struct Bytes {
  using Element = std::uint8_t;
  using Accumulator = std::uint8_t;
  constexpr Accumulator first(Element x) const { return kTruth ? std::uint8_t{x != 0} : x; }
  constexpr Element last(Accumulator value) const { return value; }
};

template <bool kTruth>
struct And : Bytes<kTruth> {
  constexpr std::uint8_t next(std::uint8_t left, std::uint8_t x) const {
    return left & this->first(x);
  }
};

template <bool kTruth>
struct Or : Bytes<kTruth> {
  constexpr std::uint8_t next(std::uint8_t left, std::uint8_t x) const {
    return left | this->first(x);
  }
};

template <bool kTruth>
struct Xor : Bytes<kTruth> {
  constexpr std::uint8_t next(std::uint8_t left, std::uint8_t x) const {
    return left ^ this->first(x);
  }
};

/// (a + bi)(c + di) = (ac - bd) + (ad + bc)i, each operation rounded.
template <typename T>
struct ComplexProduct {
  struct Number {
    T real;
    T imaginary;
  };
  using Element = Number;
  using Accumulator = Number;
  constexpr Number first(Number x) const { return x; }
  constexpr Number next(Number left, Number x) const {
    return {left.real * x.real - left.imaginary * x.imaginary,
            left.real * x.imaginary + left.imaginary * x.real};
  }
  constexpr Number last(Number value) const {
    return {Real<T>::write(value.real), Real<T>::write(value.imaginary)};
  }
};

}  // namespace dreamcomm::kernels

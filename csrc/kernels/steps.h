// The arithmetic on an element of a bucket between reading and rounding, and the loops
// around it. A is float or double.
#pragma once

#include <cmath>
#include <cstddef>

#include "kernels/formats.h"
#include "kernels/transfer/transfer.h"
#include "kernels/vectors.h"

namespace dreamcomm::kernels {

template <typename A>
struct Multiply {
  A scale;
  A operator()(A x) const { return x * scale; }
};

template <typename A>
struct Divide {
  A divisor;
  A scale;
  A operator()(A x) const { return x / divisor * scale; }
};

/// True if 1 / divisor is exact, so that to multiply by it gives the same bits.
inline bool is_power_of_two(double divisor) {
  int exponent = 0;
  return std::frexp(divisor, &exponent) == 0.5;
}

/// Calls `use` with the step of `terms`: a multiplication where that gives the same.
template <typename A, typename Use>
void with_step(const Terms& terms, const Use& use) {
  const auto divisor = static_cast<A>(terms.divisor);
  const auto scale = static_cast<A>(terms.scale);
  if (divisor == 1) return use(Multiply<A>{scale});
  if (scale == 1 && is_power_of_two(terms.divisor)) return use(Multiply<A>{1 / divisor});
  use(Divide<A>{divisor, scale});
}

// `out` may be equal to `in`: an element is read before it is written, only by the same iteration.
// `ivdep` says so to the compiler.

/// out[i] = step(in[i]), between the formats of formats.h.
template <typename From, typename To, typename Step>
void apply(const Step& step, const typename From::Element* in, typename To::Element* out,
           std::size_t count) {
  run_simd([step, in, out, count] {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) out[i] = To::write(step(From::read(in[i])));
  });
}

}  // namespace dreamcomm::kernels

// The operations on a floating-point format.
#pragma once

#include <cstddef>

#include "core/types.h"
#include "kernels/fold_simd.h"
#include "kernels/operations.h"

namespace dreamcomm::kernels {

template <std::size_t M, typename F>
void reduce_real(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  switch (how.op) {
    case ReduceOp::kSum:
      return fold_simd<M>(Sum<F>(), in, out, count);
    case ReduceOp::kAvg:
      return fold_simd<M>(Average<F>(how.divisor), in, out, count);
    case ReduceOp::kPremulSum:
      return fold_simd<M>(PremulSum<F>(how), in, out, count);
    case ReduceOp::kProduct:
      return fold_simd<M>(Product<F>(), in, out, count);
    case ReduceOp::kMin:
      return fold_simd<M>(Min<F>(), in, out, count);
    case ReduceOp::kMax:
      return fold_simd<M>(Max<F>(), in, out, count);
    default:
      return;  // not defined on it; reduce() has checked
  }
}

}  // namespace dreamcomm::kernels

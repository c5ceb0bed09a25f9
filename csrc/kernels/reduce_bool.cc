// Booleans: any byte but 0 is true; results are 0 or 1.
#include "kernels/families.h"
#include "kernels/fold_simd.h"
#include "kernels/operations.h"

namespace dreamcomm::kernels {

void reduce_bool(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  switch (how.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor:
      return fold_simd<2>(Or<true>(), in, out, count);
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand:
      return fold_simd<2>(And<true>(), in, out, count);
    case ReduceOp::kBxor:
      return fold_simd<2>(Xor<true>(), in, out, count);
    default:
      return;  // not defined on it; reduce() has checked
  }
}

}  // namespace dreamcomm::kernels

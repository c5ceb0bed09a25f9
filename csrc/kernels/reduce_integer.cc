// Integers of 8 to 64 bits.
#include <type_traits>

#include "kernels/families.h"
#include "kernels/fold_simd.h"
#include "kernels/operations.h"

namespace dreamcomm::kernels {
namespace {

template <typename T>
void reduce_as(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  // Where the sign makes no difference to the bits, one kernel serves both.
  using Plain = Integer<std::make_unsigned_t<T>>;
  using Exact = Integer<T>;
  switch (how.op) {
    case ReduceOp::kSum:
      return fold_simd<2>(Sum<Plain>(), in, out, count);
    case ReduceOp::kProduct:
      return fold_simd<2>(Product<Plain>(), in, out, count);
    case ReduceOp::kPremulSum:
      return fold_simd<2>(PremulSum<Exact>(how), in, out, count);
    case ReduceOp::kAvg:
      return fold_simd<2>(Average<Exact>(how.divisor), in, out, count);
    case ReduceOp::kMin:
      return fold_simd<2>(Min<Exact>(), in, out, count);
    case ReduceOp::kMax:
      return fold_simd<2>(Max<Exact>(), in, out, count);
    case ReduceOp::kBand:
      return fold_simd<2>(And<false>(), in, out, count * sizeof(T));
    case ReduceOp::kBor:
      return fold_simd<2>(Or<false>(), in, out, count * sizeof(T));
    case ReduceOp::kBxor:
      return fold_simd<2>(Xor<false>(), in, out, count * sizeof(T));
    case ReduceOp::kNone:
      return;  // moves data only; reduce() has checked
  }
}

}  // namespace

void reduce_integer(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  switch (how.dtype) {
    case DType::kUInt8:
      return reduce_as<std::uint8_t>(how, in, out, count);
    case DType::kInt8:
      return reduce_as<std::int8_t>(how, in, out, count);
    case DType::kUInt16:
      return reduce_as<std::uint16_t>(how, in, out, count);
    case DType::kInt16:
      return reduce_as<std::int16_t>(how, in, out, count);
    case DType::kUInt32:
      return reduce_as<std::uint32_t>(how, in, out, count);
    case DType::kInt32:
      return reduce_as<std::int32_t>(how, in, out, count);
    case DType::kUInt64:
      return reduce_as<std::uint64_t>(how, in, out, count);
    case DType::kInt64:
      return reduce_as<std::int64_t>(how, in, out, count);
    default:
      return;  // not an integer; reduce() has checked
  }
}

}  // namespace dreamcomm::kernels

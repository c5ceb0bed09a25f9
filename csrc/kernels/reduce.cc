#include "kernels/reduce.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "kernels/families.h"
#include "kernels/vectors.h"

namespace dreamcomm {
namespace {

bool is_signed(DType t) {
  return t == DType::kInt8 || t == DType::kInt16 || t == DType::kInt32 || t == DType::kInt64;
}

/// True if `factor` is a value of the integer type `t`.
bool fits(double factor, DType t) {
  const int bits = static_cast<int>(8 * item_size(t)) - (is_signed(t) ? 1 : 0);
  return factor == std::trunc(factor) && factor < std::ldexp(1.0, bits) &&
         factor >= (is_signed(t) ? -std::ldexp(1.0, bits) : 0.0);
}

}  // namespace

std::string_view instruction_set() { return kernels::vectors_name(); }

void check_defined(const Reduction& how) {
  check(is_defined(how.op, how.dtype), ErrorKind::kInvalid, "cannot reduce ", name(how.dtype),
        " with ", name(how.op), ": it is not defined on that type");
  check(how.op != ReduceOp::kAvg || how.divisor >= 1, ErrorKind::kInvalid,
        "AVG divides by the number of ranks, at least 1; got ", how.divisor);
  if (how.op == ReduceOp::kPremulSum && !is_floating(how.dtype) && !is_complex(how.dtype)) {
    check(fits(how.factor, how.dtype), ErrorKind::kInvalid, "PREMUL_SUM's factor ", how.factor,
          " is no value of the tensor's type ", name(how.dtype));
  }
}

void reduce(const Reduction& how, std::span<const std::byte* const> in, std::byte* out,
            std::size_t count) {
  check_defined(how);
  if (count == 0) return;
  check(!in.empty(), ErrorKind::kInvalid, "cannot reduce no inputs at all to ", count,
        " elements of ", name(how.dtype));
  if (how.dtype == DType::kBool) return kernels::reduce_bool(how, in, out, count);
  if (is_complex(how.dtype)) return kernels::reduce_complex(how, in, out, count);
  if (how.dtype == DType::kFloat16 || how.dtype == DType::kBFloat16) {
    return kernels::reduce_half(how, in, out, count);
  }
  if (is_floating(how.dtype)) return kernels::reduce_floating(how, in, out, count);
  kernels::reduce_integer(how, in, out, count);
}

void reduce_into(const Reduction& how, std::span<const std::byte*> in,
                 std::span<std::byte* const> outs, std::size_t count) {
  constexpr std::size_t kTile = std::size_t{8} << 10;
  alignas(64) std::array<std::byte, kTile> tile;
  const std::size_t item = item_size(how.dtype);
  for (std::size_t begin = 0; begin < count; begin += kTile / item) {
    const std::size_t n = std::min(kTile / item, count - begin);
    reduce(how, in, tile.data(), n);
    for (std::byte* out : outs) std::memcpy(out + begin * item, tile.data(), n * item);
    for (const std::byte*& source : in) source += n * item;
  }
}

}  // namespace dreamcomm

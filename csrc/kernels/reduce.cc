#include "kernels/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

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
  check(how.op != ReduceOp::kAvg || how.divisor > 0, ErrorKind::kInvalid,
        "AVG divides by a number above 0, such as the number of ranks; got ", how.divisor);
  if (how.op == ReduceOp::kPremulSum && !is_floating(how.dtype) && !is_complex(how.dtype)) {
    check(fits(how.factor, how.dtype), ErrorKind::kInvalid, "PREMUL_SUM's factor ", how.factor,
          " is no value of the tensor's type ", name(how.dtype));
  }
}

namespace {

/// Elements: a tile for each level of the tree lies in the L1 cache.
constexpr std::size_t kTreeTile = 1024;

/// Adds the operands of one tile along a binary tree, and gives the sum's two halves to `last`.
class Tree {
 public:
  Tree(const Reduction& how, std::span<const std::byte* const> in) : in_(in), sum_(how) {
    sum_.op = ReduceOp::kSum;
    sum_.along_tree = false;
    const int levels = std::bit_width(in.size()) - 1;
    tiles_.resize(2 * static_cast<std::size_t>(levels) * kTreeTile * item_size(how.dtype));
  }

  /// Operands `first` to `first + count` from byte `at` on, or their sum; `level` above the leaves.
  const std::byte* operand(std::size_t first, std::size_t count, std::size_t at, std::size_t n,
                           std::size_t side) {
    if (count == 1) return in_[first] + at;
    const std::size_t half = count / 2;
    const std::array both{operand(first, half, at, n, 0), operand(first + half, half, at, n, 1)};
    const auto level = static_cast<std::size_t>(std::bit_width(half) - 1);
    std::byte* const sum = tiles_.data() + (2 * level + side) * kTreeTile * item_size(sum_.dtype);
    reduce(sum_, both, sum, n);
    return sum;
  }

 private:
  const std::span<const std::byte* const> in_;
  Reduction sum_;
  std::vector<std::byte> tiles_;
};

/// The operands of a tree of two are those of a fold, which also divides.
void reduce_along_tree(const Reduction& how, std::span<const std::byte* const> in, std::byte* out,
                       std::size_t count) {
  check(std::has_single_bit(in.size()) && (how.op == ReduceOp::kSum || how.op == ReduceOp::kAvg) &&
            (how.dtype == DType::kFloat32 || how.dtype == DType::kFloat64),
        ErrorKind::kInvalid,
        "only sums and averages of float32 and float64 are added along a tree,",
        " over a power of two of ranks; got ", name(how.op), " of ", in.size(), " x ",
        name(how.dtype));
  Reduction last = how;
  last.along_tree = false;
  Tree tree(how, in);
  const std::size_t half = in.size() / 2;
  const std::size_t item = item_size(how.dtype);
  for (std::size_t begin = 0; begin < count; begin += kTreeTile) {
    const std::size_t n = std::min(kTreeTile, count - begin);
    const std::array both{tree.operand(0, half, begin * item, n, 0),
                          tree.operand(half, half, begin * item, n, 1)};
    reduce(last, both, out + begin * item, n);
  }
}

}  // namespace

void reduce(const Reduction& how, std::span<const std::byte* const> in, std::byte* out,
            std::size_t count) {
  check_defined(how);
  if (count == 0) return;
  check(!in.empty(), ErrorKind::kInvalid, "cannot reduce no inputs at all to ", count,
        " elements of ", name(how.dtype));
  if (how.along_tree && in.size() > 2) return reduce_along_tree(how, in, out, count);
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

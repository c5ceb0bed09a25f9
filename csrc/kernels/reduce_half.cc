// float16 and bfloat16, accumulated in float32.
//
// AVX512_BF16 and AVX512_FP16 are not used: the former's conversion flushes
// subnormal numbers to zero, the latter's sums round to 16 bits at every step. Both
// would give other bits than the machine next to it does.
#include <array>
#include <cstdint>

#include "kernels/convert_half.h"
#include "kernels/families.h"
#include "kernels/reduce_real.h"

namespace dreamcomm::kernels {
namespace {

constexpr std::size_t kOperands = 8;
constexpr std::size_t kBlock = 512;  // elements; the blocks of all operands fit into L1

/// Block by block: the operands made float32 by the machine's own conversion, folded,
/// and rounded once.
void reduce_widened(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  alignas(64) std::array<std::array<float, kBlock>, kOperands> wide;
  std::array<const std::byte*, kOperands> operands;
  Reduction single = how;
  single.dtype = DType::kFloat32;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    for (std::size_t i = 0; i < in.size(); ++i) {
      widen_halves(reinterpret_cast<const std::uint16_t*>(in[i]) + begin, wide[i].data(), n);
      operands[i] = reinterpret_cast<const std::byte*>(wide[i].data());
    }
    reduce_floating(single, Operands(operands).first(in.size()),
                    reinterpret_cast<std::byte*>(wide[0].data()), n);
    narrow_to_halves(wide[0].data(), reinterpret_cast<std::uint16_t*>(out) + begin, n);
  }
}

}  // namespace

void reduce_half(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  if (how.dtype == DType::kBFloat16) return reduce_real<2, BFloat16>(how, in, out, count);
  if (in.size() <= kOperands && converts_halves()) return reduce_widened(how, in, out, count);
  reduce_real<2, Float16>(how, in, out, count);
}

}  // namespace dreamcomm::kernels

// float16 and bfloat16, accumulated in float32.
//
// AVX512_BF16 and AVX512_FP16 are not used: the former's conversion flushes
// subnormal numbers to zero, the latter's sums round to 16 bits at every step. Both
// would give other bits than the machine next to it does.
#include <array>
#include <cstdint>

#include "core/half.h"
#include "kernels/families.h"
#include "kernels/reduce_real.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dreamcomm::kernels {
namespace {

#if defined(__x86_64__) && defined(__GNUC__)

bool converts_halves() { return __builtin_cpu_supports("f16c") && vectors() != Vectors::kSse2; }

[[gnu::target("avx2,f16c")]] void widen(const std::uint16_t* from, float* to, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const auto halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < count; ++i) to[i] = float16_to_float(from[i]);
}

/// Every NaN among `from` is the quiet one that the kernels write.
[[gnu::target("avx2,f16c")]] void narrow(const float* from, std::uint16_t* to, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < count; ++i) to[i] = float_to_float16(from[i]);
}

#else

bool converts_halves() { return false; }
void widen(const std::uint16_t*, float*, std::size_t) {}
void narrow(const float*, std::uint16_t*, std::size_t) {}

#endif

constexpr std::size_t kOperands = 8;
constexpr std::size_t kBlock = 512;  // elements; the blocks of all operands fit into L1

/// Block by block: the operands made float32 by the machine's own conversion, folded,
/// and rounded once. The compiler makes no vectors of such conversions by itself.
void reduce_widened(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  alignas(64) std::array<std::array<float, kBlock>, kOperands> wide;
  std::array<const std::byte*, kOperands> operands;
  Reduction single = how;
  single.dtype = DType::kFloat32;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    for (std::size_t i = 0; i < in.size(); ++i) {
      widen(reinterpret_cast<const std::uint16_t*>(in[i]) + begin, wide[i].data(), n);
      operands[i] = reinterpret_cast<const std::byte*>(wide[i].data());
    }
    reduce_floating(single, Operands(operands).first(in.size()),
                    reinterpret_cast<std::byte*>(wide[0].data()), n);
    narrow(wide[0].data(), reinterpret_cast<std::uint16_t*>(out) + begin, n);
  }
}

}  // namespace

void reduce_half(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  if (how.dtype == DType::kBFloat16) return reduce_real<2, BFloat16>(how, in, out, count);
  if (in.size() <= kOperands && converts_halves()) return reduce_widened(how, in, out, count);
  reduce_real<2, Float16>(how, in, out, count);
}

}  // namespace dreamcomm::kernels

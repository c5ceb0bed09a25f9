#include "kernels/convert_half.h"

#include "core/half.h"
#include "kernels/vectors.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dreamcomm::kernels {
namespace {

void widen_each(const std::uint16_t* from, float* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = float16_to_float(from[i]);
}

void narrow_each(const float* from, std::uint16_t* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = float_to_float16(from[i]);
}

#if defined(__x86_64__) && defined(__GNUC__)

[[gnu::target("avx2,f16c")]] void widen_f16c(const std::uint16_t* from, float* to,
                                             std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const auto halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  widen_each(from + i, to + i, count - i);
}

[[gnu::target("avx2,f16c")]] void narrow_f16c(const float* from, std::uint16_t* to,
                                              std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  narrow_each(from + i, to + i, count - i);
}

#endif

}  // namespace

#if defined(__x86_64__) && defined(__GNUC__)

bool converts_halves() { return __builtin_cpu_supports("f16c") && vectors() != Vectors::kSse2; }

void widen_halves(const std::uint16_t* from, float* to, std::size_t count) {
  converts_halves() ? widen_f16c(from, to, count) : widen_each(from, to, count);
}

void narrow_to_halves(const float* from, std::uint16_t* to, std::size_t count) {
  converts_halves() ? narrow_f16c(from, to, count) : narrow_each(from, to, count);
}

#else

bool converts_halves() { return false; }

void widen_halves(const std::uint16_t* from, float* to, std::size_t count) {
  widen_each(from, to, count);
}

void narrow_to_halves(const float* from, std::uint16_t* to, std::size_t count) {
  narrow_each(from, to, count);
}

#endif

}  // namespace dreamcomm::kernels

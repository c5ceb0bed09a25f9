// Loops with fused multiply-adds: the same bits on every instruction set, because the source names
// each of them. Where the machine has no instruction for it, the C library computes it: slowly.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "kernels/vectors.h"

namespace dreamcomm::kernels {

inline float fuse(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fuse(double a, double b, double c) { return __builtin_fma(a, b, c); }

#if defined(__x86_64__) && defined(__GNUC__)

/// The vectors that such loops are compiled for: those of vectors.h, AVX2 only with FMA.
inline Vectors fused_vectors() {
  if (vectors() == Vectors::kAvx2 && !__builtin_cpu_supports("fma")) return Vectors::kSse2;
  return vectors();
}

/// The levels that this machine has: for tests, which compare their bits.
inline std::span<const Vectors> fused_levels() {
  static constexpr std::array kAll{Vectors::kSse2, Vectors::kAvx2, Vectors::kAvx512};
  return std::span(kAll).first(static_cast<std::size_t>(fused_vectors()) + 1);
}

template <typename Loop>
[[gnu::target("avx2,fma"), gnu::flatten]] void run_avx2_fma(const Loop& loop) {
  loop();
}

/// Calls `loop`, compiled for `level`.
template <typename Loop>
void run_fused(Vectors level, const Loop& loop) {
  // A copy that only this call has: the compiler knows that the loop's writes do not change it.
  const auto own = [&loop] {
    const Loop copy = loop;
    copy();
  };
  switch (level) {
    case Vectors::kAvx512:
      return run_avx512(own);
    case Vectors::kAvx2:
      return run_avx2_fma(own);
    case Vectors::kSse2:
      return own();
  }
}

#else  // the compiler's target is what the machine has: NEON on aarch64

enum class Vectors { kOnly };

inline Vectors fused_vectors() { return Vectors::kOnly; }

inline std::span<const Vectors> fused_levels() {
  static constexpr std::array kAll{Vectors::kOnly};
  return kAll;
}

template <typename Loop>
void run_fused(Vectors /*level*/, const Loop& loop) {
  loop();
}

#endif

}  // namespace dreamcomm::kernels

// The vectors that the machine has, and code that is compiled for the widest of them.
#pragma once

#include <string_view>

namespace dreamcomm::kernels {

#if defined(__x86_64__) && defined(__GNUC__)

/// Which of x86's vectors the machine has; looked up once, because it does not change.
enum class Vectors { kSse2, kAvx2, kAvx512 };

inline Vectors vectors() {
  static const Vectors best = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return Vectors::kAvx512;
    }
    return __builtin_cpu_supports("avx2") ? Vectors::kAvx2 : Vectors::kSse2;
  }();
  return best;
}

/// `flatten` inlines all that the loop calls, which is then vectorised for this target.
template <typename Loop>
[[gnu::target("avx2"), gnu::flatten]] void run_avx2(const Loop& loop) {
  loop();
}

template <typename Loop>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"), gnu::flatten]] void
run_avx512(const Loop& loop) {
  loop();
}

/// Calls `loop`, compiled for the widest vectors of the machine.
template <typename Loop>
void run_simd(const Loop& loop) {
  switch (vectors()) {
    case Vectors::kAvx512:
      return run_avx512(loop);
    case Vectors::kAvx2:
      return run_avx2(loop);
    case Vectors::kSse2:
      return loop();
  }
}

inline std::string_view vectors_name() {
  switch (vectors()) {
    case Vectors::kAvx512:
      return "AVX-512";
    case Vectors::kAvx2:
      return "AVX2";
    default:
      return "SSE2";
  }
}

#else  // the compiler's target is what the machine has: NEON on aarch64

template <typename Loop>
void run_simd(const Loop& loop) {
  loop();
}

inline std::string_view vectors_name() {
#if defined(__ARM_NEON)
  return "NEON";
#else
  return "portable code";
#endif
}

#endif

}  // namespace dreamcomm::kernels

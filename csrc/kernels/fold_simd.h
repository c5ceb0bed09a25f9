// The fold compiled for the widest vectors the machine has. Without fused
// multiply-adds the instruction set does not change a bit of the result.
#pragma once

#include <cstddef>

#include "kernels/fold.h"
#include "kernels/vectors.h"

namespace dreamcomm::kernels {

#if defined(__x86_64__) && defined(__GNUC__)

/// `flatten` inlines the whole loop, which is then vectorised for this target.
template <std::size_t M, typename K>
[[gnu::target("avx2"), gnu::flatten]] void fold_avx2(const K& kernel, Operands in, std::byte* out,
                                                     std::size_t count) {
  fold<M>(kernel, in, out, count);
}

template <std::size_t M, typename K>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"), gnu::flatten]] void
fold_avx512(const K& kernel, Operands in, std::byte* out, std::size_t count) {
  fold<M>(kernel, in, out, count);
}

template <std::size_t M, typename K>
void fold_simd(const K& kernel, Operands in, std::byte* out, std::size_t count) {
  switch (vectors()) {
    case Vectors::kAvx512:
      return fold_avx512<M>(kernel, in, out, count);
    case Vectors::kAvx2:
      return fold_avx2<M>(kernel, in, out, count);
    case Vectors::kSse2:
      return fold<M>(kernel, in, out, count);
  }
}

/// For kernels that alternately add and subtract products. g++ fuses these operations wherever the
/// target can, whatever -ffp-contract says, and AVX-512 can.
template <std::size_t M, typename K>
void fold_unfused(const K& kernel, Operands in, std::byte* out, std::size_t count) {
  if (vectors() == Vectors::kSse2) return fold<M>(kernel, in, out, count);
  fold_avx2<M>(kernel, in, out, count);
}

#else  // the compiler's target is what the machine has: NEON on aarch64

template <std::size_t M, typename K>
void fold_simd(const K& kernel, Operands in, std::byte* out, std::size_t count) {
  fold<M>(kernel, in, out, count);
}

template <std::size_t M, typename K>
void fold_unfused(const K& kernel, Operands in, std::byte* out, std::size_t count) {
  fold<M>(kernel, in, out, count);
}

#endif

}  // namespace dreamcomm::kernels

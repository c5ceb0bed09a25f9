// The fold compiled for the widest vectors the machine has. Without fused
// multiply-adds the instruction set does not change a bit of the result.
#pragma once

#include <cstddef>

#include "kernels/fold.h"

namespace dreamcomm::kernels {

#if defined(__x86_64__) && defined(__GNUC__)

/// `flatten` inlines the whole loop, which is then vectorised for this target.
template <std::size_t M, typename K>
[[gnu::target("avx2"), gnu::flatten]] void fold_avx2(const K& kernel, Operands in, std::byte* out,
                                                     std::size_t count) {
  fold<M>(kernel, in, out, count);
}

template <std::size_t M, typename K>
void fold_simd(const K& kernel, Operands in, std::byte* out, std::size_t count) {
  if (__builtin_cpu_supports("avx2")) return fold_avx2<M>(kernel, in, out, count);
  fold<M>(kernel, in, out, count);
}

#else

template <std::size_t M, typename K>
void fold_simd(const K& kernel, Operands in, std::byte* out, std::size_t count) {
  fold<M>(kernel, in, out, count);
}

#endif

}  // namespace dreamcomm::kernels

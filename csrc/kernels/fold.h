// The loop under every reduction: several arrays folded into one, left to right.
//
// A kernel K says what to do with one element:
//   K::Element                                  what memory holds
//   K::Accumulator                              what a partial result is kept in
//   first(Element) -> Accumulator               takes the leftmost operand
//   next(Accumulator, Element) -> Accumulator   takes one more
//   last(Accumulator) -> Element                gives the result
// and, where each operand has a factor of its own,
//   factor(operand) -> Accumulator              to be passed to first() and next()
// Every element goes through the same operations whatever its place, so equal
// inputs give equal bits however an array is cut. That also needs the compiler
// flag -ffp-contract=off: with fused multiply-adds the bits would depend on what
// the compiler chose to fuse, and on the instruction set.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>

namespace dreamcomm::kernels {

using Operands = std::span<const std::byte* const>;

/// Element i of `M` neighbouring operands, from element `begin` on.
template <typename K, std::size_t M>
class Group {
 public:
  using Element = typename K::Element;
  using Accumulator = typename K::Accumulator;

  Group(const K& kernel, Operands in, std::size_t operand, std::size_t begin) {
    for (std::size_t m = 0; m < M; ++m) {
      at_[m] = reinterpret_cast<const Element*>(in[operand + m]) + begin;
      if constexpr (kScaled) factors_[m] = kernel.factor(operand + m);
    }
  }
  /// The partial result of the operands to the left, and these.
  Accumulator join(const K& kernel, Accumulator left, std::size_t i) const {
    return join_from<0>(kernel, left, i, std::make_index_sequence<M>());
  }
  /// The partial result of these operands, the leftmost of all.
  Accumulator start(const K& kernel, std::size_t i) const {
    return join_from<1>(kernel, first(kernel, i), i, std::make_index_sequence<M - 1>());
  }

 private:
  static constexpr bool kScaled = requires(const K& kernel) { kernel.factor(0); };

  Accumulator first(const K& kernel, std::size_t i) const {
    if constexpr (kScaled) {
      return kernel.first(at_[0][i], factors_[0]);
    } else {
      return kernel.first(at_[0][i]);
    }
  }
  Accumulator next(const K& kernel, Accumulator left, std::size_t m, std::size_t i) const {
    if constexpr (kScaled) {
      return kernel.next(left, at_[m][i], factors_[m]);
    } else {
      return kernel.next(left, at_[m][i]);
    }
  }
  template <std::size_t From, std::size_t... I>
  Accumulator join_from(const K& kernel, Accumulator left, [[maybe_unused]] std::size_t i,
                        std::index_sequence<I...> /*unused*/) const {
    ((left = next(kernel, left, From + I, i)), ...);
    return left;
  }

  std::array<const Element*, M> at_;
  std::array<Accumulator, kScaled ? M : 0> factors_;
};

// `out` may be one of the operands. An element of it is written after the last read of that element
// anywhere, so no iteration depends on another. `ivdep` says so to the compiler, which otherwise
// would not vectorise for equal pointers.

/// All `M` operands in one go.
template <std::size_t M, typename K>
inline void fold_whole(const K& kernel, Operands in, typename K::Element* out, std::size_t count) {
  const Group<K, M> group(kernel, in, 0, 0);
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = kernel.last(group.start(kernel, i));
}

/// The last `M` operands of a block.
template <std::size_t M, typename K>
inline void finish_block(const K& kernel, const typename K::Accumulator* block, Operands in,
                         std::size_t begin, typename K::Element* out, std::size_t n) {
  const Group<K, M> group(kernel, in, in.size() - M, begin);
#pragma GCC ivdep
  for (std::size_t i = 0; i < n; ++i) out[i] = kernel.last(group.join(kernel, block[i], i));
}

/// The last operands of a block, `M` at the most and at least one.
template <std::size_t M, typename K>
inline void finish_rest(const K& kernel, const typename K::Accumulator* block, Operands in,
                        std::size_t rest, std::size_t begin, typename K::Element* out,
                        std::size_t n) {
  if constexpr (M > 1) {
    if (rest < M) return finish_rest<M - 1>(kernel, block, in, rest, begin, out, n);
  }
  finish_block<M>(kernel, block, in, begin, out, n);
}

/// More than `M` operands: as many at a time, block by block. The partial
/// results of a block stay in the L1 cache.
template <std::size_t M, typename K>
inline void fold_blocks(const K& kernel, Operands in, typename K::Element* out, std::size_t count) {
  using Accumulator = typename K::Accumulator;
  constexpr std::size_t kBlock = 2048 / sizeof(Accumulator);
  alignas(64) std::array<Accumulator, kBlock> block;

  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    const Group<K, M> leftmost(kernel, in, 0, begin);
    for (std::size_t i = 0; i < n; ++i) block[i] = leftmost.start(kernel, i);
    std::size_t done = M;
    for (; done + M < in.size(); done += M) {
      const Group<K, M> group(kernel, in, done, begin);
      for (std::size_t i = 0; i < n; ++i) block[i] = group.join(kernel, block[i], i);
    }
    finish_rest<M>(kernel, block.data(), in, in.size() - done, begin, out + begin, n);
  }
}

template <std::size_t M, typename K>
inline void fold_few(const K& kernel, Operands in, typename K::Element* out, std::size_t count) {
  if constexpr (M > 1) {
    if (in.size() < M) return fold_few<M - 1>(kernel, in, out, count);
  }
  fold_whole<M>(kernel, in, out, count);
}

/// out[i] = in[0][i] op in[1][i] op ... for i in [0, count). `in` is not empty. `M` operands are
/// read side by side. A larger M saves memory traffic, where that is the limit, and costs code.
template <std::size_t M, typename K>
inline void fold(const K& kernel, Operands in, std::byte* out, std::size_t count) {
  auto* result = reinterpret_cast<typename K::Element*>(out);
  if (in.size() <= M) return fold_few<M>(kernel, in, result, count);
  fold_blocks<M>(kernel, in, result, count);
}

}  // namespace dreamcomm::kernels

// The loops that lanes of a block share: fold several tensors into one or more, and copy.
//
// Lane l takes packs l, l + lanes, ... so that neighbours read neighbouring packs. Each
// holds several packs of every operand under way before it needs one: the more bytes are
// under way, the nearer a GPU comes to its memory's speed. Elements are combined in the
// order of the operands, as on the CPU (kernels/operations.h has the operations), so
// equal inputs give equal bits on either, whatever the number of blocks and lanes.
#pragma once

#include <algorithm>
#include <cstddef>

#include "core/types.h"
#include "gpu/formats.h"
#include "gpu/pack.h"
#include "gpu/target.h"
#include "kernels/operations.h"

namespace dreamcomm::gpu {

inline constexpr int kDeep = 4;  // in copies

/// In folds: as many packs as leave their partial results in registers.
template <typename E>
inline constexpr int kFoldDeep = std::clamp(16 / Pack<E>::kItems, 1, 4);

/// Addresses, one for each rank.
struct Pointers {
  std::byte* at[kMaxRanks];
};
struct Sources {
  const std::byte* at[kMaxRanks];
};

/// What to do with operands.
struct Recipe {
  ReduceOp op = ReduceOp::kSum;
  int divisor = 1;  // of AVG
};

/// The partial results of one pack.
template <typename F>
struct Partial {
  using Element = typename F::Element;
  static constexpr int kItems = Pack<Element>::kItems;
  typename F::Accumulator item[kItems];

  DREAMCOMM_DEVICE void start(const Pack<Element>& operand) {
    for (int i = 0; i < kItems; ++i) item[i] = F::read(operand.item[i]);
  }
  template <typename K>
  DREAMCOMM_DEVICE void join_by(const K& kernel, const Pack<Element>& operand) {
    for (int i = 0; i < kItems; ++i) item[i] = kernel.next(item[i], operand.item[i]);
  }
  /// One branch for a pack: it is the same for all lanes, and the memory is the limit.
  DREAMCOMM_DEVICE void join(ReduceOp op, const Pack<Element>& operand) {
    switch (op) {
      case ReduceOp::kProduct:
        return join_by(kernels::Product<F>(), operand);
      case ReduceOp::kMin:
        return join_by(kernels::Min<F>(), operand);
      case ReduceOp::kMax:
        return join_by(kernels::Max<F>(), operand);
      default:
        return join_by(kernels::Sum<F>(), operand);
    }
  }
  DREAMCOMM_DEVICE Pack<Element> end(const Recipe& recipe) const {
    Pack<Element> result;
    const bool divides = recipe.op == ReduceOp::kAvg;
    for (int i = 0; i < kItems; ++i) {
      result.item[i] = F::write(divides ? F::divide(item[i], recipe.divisor) : item[i]);
    }
    return result;
  }
};

/// Element `index` of every source, into all outs.
template <typename F>
DREAMCOMM_DEVICE void fold_item(const Recipe& recipe, const Sources& in, int operands,
                                const Pointers& out, int outs, std::size_t index) {
  using Element = typename F::Element;
  const auto read = [&](int k) {
    Pack<Element> operand{};
    operand.item[0] = reinterpret_cast<const Element*>(in.at[k])[index];
    return operand;
  };
  Partial<F> partial;
  partial.start(read(0));
  for (int k = 1; k < operands; ++k) partial.join(recipe.op, read(k));
  const Element result = partial.end(recipe).item[0];
  for (int k = 0; k < outs; ++k) reinterpret_cast<Element*>(out.at[k])[index] = result;
}

template <bool kAligned, typename F, Target T>
DREAMCOMM_DEVICE void fold_packs(const T& target, const Recipe& recipe, const Sources& in,
                                 int operands, const Pointers& out, int outs, std::size_t packs) {
  using Element = typename F::Element;
  constexpr int kDeep = kFoldDeep<Element>;
  const auto lanes = static_cast<std::size_t>(target.lanes());
  for (std::size_t first = static_cast<std::size_t>(target.lane()); first < packs;
       first += kDeep * lanes) {
    Partial<F> partials[kDeep];
    Pack<Element> operand[kDeep] = {};
    const auto read = [&](int k) {
      for (int d = 0; d < kDeep; ++d) {
        const std::size_t index = first + static_cast<std::size_t>(d) * lanes;
        if (index < packs) operand[d] = load<kAligned, Element>(in.at[k], index);
      }
    };
    read(0);
    for (int d = 0; d < kDeep; ++d) partials[d].start(operand[d]);
    for (int k = 1; k < operands; ++k) {
      read(k);
      for (int d = 0; d < kDeep; ++d) partials[d].join(recipe.op, operand[d]);
    }
    for (int d = 0; d < kDeep; ++d) {
      const std::size_t index = first + static_cast<std::size_t>(d) * lanes;
      if (index >= packs) break;
      const Pack<Element> result = partials[d].end(recipe);
      for (int k = 0; k < outs; ++k) store<kAligned>(out.at[k], index, result);
    }
  }
}

/// out[j][i] = in[0][i] op in[1][i] op ... for `count` elements and every out. An out
/// may be one of the sources.
template <typename F, Target T>
DREAMCOMM_DEVICE_LOOP void fold(const T& target, const Recipe& recipe, const Sources& in,
                                int operands, const Pointers& out, int outs, std::size_t count) {
  bool aligned = true;
  for (int k = 0; k < operands; ++k) aligned = aligned && is_packed(in.at[k]);
  for (int k = 0; k < outs; ++k) aligned = aligned && is_packed(out.at[k]);
  constexpr auto kItems = static_cast<std::size_t>(Pack<typename F::Element>::kItems);
  target.count(count * sizeof(typename F::Element), operands, outs);
  const std::size_t packs = count / kItems;
  if (aligned) {
    fold_packs<true, F>(target, recipe, in, operands, out, outs, packs);
  } else {
    fold_packs<false, F>(target, recipe, in, operands, out, outs, packs);
  }
  for (std::size_t i = packs * kItems + static_cast<std::size_t>(target.lane()); i < count;
       i += static_cast<std::size_t>(target.lanes())) {
    fold_item<F>(recipe, in, operands, out, outs, i);
  }
}

/// memcpy by all lanes of pieces that suit the alignment of all addresses.
template <typename Piece, Target T>
DREAMCOMM_DEVICE std::size_t copy_pieces(const T& target, std::byte* to, std::byte* also,
                                         const std::byte* from, std::size_t begin,
                                         std::size_t bytes) {
  const auto lanes = static_cast<std::size_t>(target.lanes());
  const std::size_t pieces = (bytes - begin) / sizeof(Piece);
  const auto* source = reinterpret_cast<const Piece*>(from + begin);
  auto* first = reinterpret_cast<Piece*>(to + begin);
  auto* second = reinterpret_cast<Piece*>(also == nullptr ? nullptr : also + begin);
  for (std::size_t at = static_cast<std::size_t>(target.lane()); at < pieces; at += kDeep * lanes) {
    Piece under_way[kDeep] = {};
    for (int d = 0; d < kDeep; ++d) {
      const std::size_t index = at + static_cast<std::size_t>(d) * lanes;
      if (index < pieces) under_way[d] = source[index];
    }
    for (int d = 0; d < kDeep; ++d) {
      const std::size_t index = at + static_cast<std::size_t>(d) * lanes;
      if (index >= pieces) break;
      first[index] = under_way[d];
      if (second != nullptr) second[index] = under_way[d];
    }
  }
  return begin + pieces * sizeof(Piece);
}

/// memcpy by all lanes, to one place or two; nothing where a place is the source itself.
template <Target T>
DREAMCOMM_DEVICE_LOOP void copy(const T& target, std::byte* to, std::byte* also,
                                const std::byte* from, std::size_t bytes) {
  if (to == from) return;
  target.count(bytes, 1, also == nullptr ? 1 : 2);
  const std::uintptr_t all = reinterpret_cast<std::uintptr_t>(to) |
                             reinterpret_cast<std::uintptr_t>(also) |
                             reinterpret_cast<std::uintptr_t>(from);
  std::size_t done = 0;
  if (all % kPackBytes == 0) {
    done = copy_pieces<Pack<std::uint64_t>>(target, to, also, from, done, bytes);
  } else if (all % 4 == 0) {
    done = copy_pieces<std::uint32_t>(target, to, also, from, done, bytes);
  } else if (all % 2 == 0) {
    done = copy_pieces<std::uint16_t>(target, to, also, from, done, bytes);
  }
  copy_pieces<std::uint8_t>(target, to, also, from, done, bytes);
}

}  // namespace dreamcomm::gpu

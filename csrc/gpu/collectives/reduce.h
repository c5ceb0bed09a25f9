// The loop by which lanes of a block reduce several tensors into one or more.
//
// Lane l takes packs l, l + lanes, ... so that neighbours read neighbouring packs. Each lane
// starts the loads of several packs of several operands before it needs the first: the more bytes
// are in flight, the closer a GPU gets to the speed of its memory, and the fewer times a call of
// few bytes waits for memory. Elements are combined in the order of the operands, as on the CPU
// (the operations are in kernels/operations.h). So equal inputs give equal bits on both, for any
// number of blocks and lanes.
#pragma once

#include <cstddef>

#include "core/types.h"
#include "gpu/collectives/formats.h"
#include "gpu/collectives/target.h"
#include "gpu/collectives/vec16.h"
#include "kernels/operations.h"

namespace dreamcomm::gpu {

/// Packs of an operand that a lane takes at a time: as many as fit with their partial results into
/// registers.
template <typename E>
inline constexpr int kReduceDepth = sizeof(E) > 1 ? 4 : 1;

/// Addresses, one for each rank.
struct Pointers {
  std::byte* at[kMaxRanks];
};
struct Sources {
  const std::byte* at[kMaxRanks];
};

/// The operation that combines the operands.
struct Recipe {
  ReduceOp op = ReduceOp::kSum;
  int divisor = 1;  // of AVG
};

/// The partial results of some elements; by default of a pack.
template <typename F, int kItems = Pack<typename F::Element>::kItems>
struct Partial {
  using Element = typename F::Element;
  typename F::Accumulator item[kItems];

  DREAMCOMM_DEVICE void start(const Element* operand) {
    for (int i = 0; i < kItems; ++i) item[i] = F::read(operand[i]);
  }
  template <typename K>
  DREAMCOMM_DEVICE void join_by(const K& kernel, const Element* operand) {
    for (int i = 0; i < kItems; ++i) item[i] = kernel.next(item[i], operand[i]);
  }
  DREAMCOMM_DEVICE void join(ReduceOp op, const Element* operand) {
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
  DREAMCOMM_DEVICE void end(const Recipe& recipe, Element* result) const {
    const bool divides = recipe.op == ReduceOp::kAvg;
    for (int i = 0; i < kItems; ++i) {
      result[i] = F::write(divides ? F::divide(item[i], recipe.divisor) : item[i]);
    }
  }
};

/// Element `index` of every source, into all outs.
template <typename F>
DREAMCOMM_DEVICE void reduce_item(const Recipe& recipe, const Sources& in, int operands,
                                  const Pointers& out, int outs, std::size_t index) {
  using Element = typename F::Element;
  const auto at = [&](int k) { return reinterpret_cast<const Element*>(in.at[k]) + index; };
  Partial<F, 1> partial;
  partial.start(at(0));
  for (int k = 1; k < operands; ++k) partial.join(recipe.op, at(k));
  Element result;
  partial.end(recipe, &result);
  for (int k = 0; k < outs; ++k) reinterpret_cast<Element*>(out.at[k])[index] = result;
}

/// Packs of one operand that one lane loads at once: from `first` on, `lanes` apart.
template <typename E>
struct Packs {
  Pack<E> at[kReduceDepth<E>] = {};

  /// Small elements are unpacked as they are loaded; with a condition, each load would be waited
  /// for before the next. So packs beyond the last one load the last one again.
  DREAMCOMM_DEVICE void load(const std::byte* from, std::size_t first, std::size_t lanes,
                             std::size_t count) {
    const auto* packs = reinterpret_cast<const Pack<E>*>(from);
    for (int d = 0; d < kReduceDepth<E>; ++d) {
      const std::size_t index = first + static_cast<std::size_t>(d) * lanes;
      if constexpr (sizeof(E) < 4) {
        at[d] = packs[index < count ? index : count - 1];
      } else if (index < count) {
        at[d] = packs[index];
      }
    }
  }
};

/// Reduces whole packs. The caller selects `kernel`, because code that selects it for each pack is
/// too long for a GPU's instruction caches. Operands are loaded in pairs. The last of an odd number
/// is paired with itself, and its copy is ignored.
template <typename F, typename K, Target T>
DREAMCOMM_DEVICE void reduce_packs(const T& target, const K& kernel, const Recipe& recipe,
                                   const Sources& in, int operands, const Pointers& out, int outs,
                                   std::size_t packs) {
  using Element = typename F::Element;
  constexpr int kDeep = kReduceDepth<Element>;
  const auto lanes = static_cast<std::size_t>(target.lanes());
  for (auto first = static_cast<std::size_t>(target.lane()); first < packs;
       first += kDeep * lanes) {
    Partial<F> partials[kDeep];
    Packs<Element> even;
    Packs<Element> odd;
    const auto join = [&](const Packs<Element>& operand) {
      for (int d = 0; d < kDeep; ++d) partials[d].join_by(kernel, operand.at[d].item);
    };
    even.load(in.at[0], first, lanes, packs);
    odd.load(in.at[operands > 1 ? 1 : 0], first, lanes, packs);
    for (int d = 0; d < kDeep; ++d) partials[d].start(even.at[d].item);
    if (operands > 1) join(odd);
    for (int k = 2; k < operands; k += 2) {
      even.load(in.at[k], first, lanes, packs);
      odd.load(in.at[k + 1 < operands ? k + 1 : k], first, lanes, packs);
      join(even);
      if (k + 1 < operands) join(odd);
    }
    for (int d = 0; d < kDeep; ++d) {
      const std::size_t index = first + static_cast<std::size_t>(d) * lanes;
      if (index >= packs) break;
      Pack<Element> result;
      partials[d].end(recipe, result.item);
      for (int k = 0; k < outs; ++k) reinterpret_cast<Pack<Element>*>(out.at[k])[index] = result;
    }
  }
}

/// out[j][i] = in[0][i] op in[1][i] op ... for `count` elements and every out. An out may be one of
/// the sources. Works element by element if one of them is not aligned to a pack.
template <typename F, Target T>
DREAMCOMM_DEVICE_LOOP void reduce(const T& target, const Recipe& recipe, const Sources& in,
                                  int operands, const Pointers& out, int outs, std::size_t count) {
  bool aligned = true;
  for (int k = 0; k < operands; ++k) aligned = aligned && is_packed(in.at[k]);
  for (int k = 0; k < outs; ++k) aligned = aligned && is_packed(out.at[k]);
  constexpr auto kItems = static_cast<std::size_t>(Pack<typename F::Element>::kItems);
  target.count(count * sizeof(typename F::Element), operands, outs);
  const std::size_t packs = aligned ? count / kItems : 0;
  const auto by = [&](const auto& kernel) {
    reduce_packs<F>(target, kernel, recipe, in, operands, out, outs, packs);
  };
  switch (recipe.op) {
    case ReduceOp::kProduct:
      by(kernels::Product<F>());
      break;
    case ReduceOp::kMin:
      by(kernels::Min<F>());
      break;
    case ReduceOp::kMax:
      by(kernels::Max<F>());
      break;
    default:
      by(kernels::Sum<F>());
  }
  for (std::size_t i = packs * kItems + static_cast<std::size_t>(target.lane()); i < count;
       i += static_cast<std::size_t>(target.lanes())) {
    reduce_item<F>(recipe, in, operands, out, outs, i);
  }
}

}  // namespace dreamcomm::gpu

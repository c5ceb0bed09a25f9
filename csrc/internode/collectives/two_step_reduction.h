// A reduction between hosts in two steps: over each host's ranks, and over the hosts.
#pragma once

#include <cstddef>

#include "core/types.h"

namespace dreamcomm {

struct TwoStepReduction {
  /// `widens`: halves are added up, and sent, in float32.
  TwoStepReduction(const Reduction& how, bool widens);

  DType type;      // of the tensors
  DType wire;      // of the sums of the hosts' ranks, as sent
  Reduction here;  // from left to right in rank order; on `wire`
  Reduction between;

  bool widens() const { return type != wire; }
  std::size_t item() const { return item_size(type); }
  std::size_t wire_item() const { return item_size(wire); }
};

}  // namespace dreamcomm

#include "transport/fabric.h"

#include <algorithm>

namespace dreamcomm {

void Fabric::number_as(std::vector<int> numbers, int size,
                       const std::array<std::uint8_t, 16>& team) {
  numbers_ = std::move(numbers);
  size_of_group_ = size;
  Header& own = header(rank());
  own.identity.rank = number(rank());
  own.identity.size = size;
  own.identity.here = static_cast<std::int32_t>(numbers_.size());
  own.identity.team = team;
  std::copy_n(numbers_.begin(), std::min(numbers_.size(), MultiNodeState::kMostNumbers),
              own.whole.numbers.begin());
}

}  // namespace dreamcomm

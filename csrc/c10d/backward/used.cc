#include "c10d/backward/used.h"

#include "c10d/backward/checks.h"

namespace dreamcomm {

std::vector<bool> UsedGradients::agree(const BucketSet& set, bool of_zeros) {
  const std::size_t count = set.parameters.size();
  if (set.rule.heaps) return std::vector<bool>(count, true);  // each bucket's pass tells
  std::vector<bool> mine(count);
  for (std::size_t i = 0; i < count; ++i) mine[i] = !of_zeros && set.parameters[i].touched;
  if (set.rule.unused == Unused::kStatic) return agree_static(set, mine, of_zeros);
  if (set.rule.unused == Unused::kExchanged) return set_on_any(set.rule.group, set.device(), mine);
  for (std::size_t i = 0; i < count; ++i)
    require_used(set.who, set.parameters[i], of_zeros || mine[i]);
  return std::vector<bool>(count, true);
}

std::vector<bool> UsedGradients::agree_static(const BucketSet& set, const std::vector<bool>& mine,
                                              bool of_zeros) {
  if (any_.empty()) any_ = set_on_any(set.rule.group, set.device(), mine);
  if (of_zeros) return any_;
  if (mine_.empty()) mine_ = mine;
  for (std::size_t i = 0; i < mine.size(); ++i)
    require_static(set.who, set.parameters[i], mine[i], mine_[i]);
  return any_;
}

void UsedGradients::forget() {
  any_.clear();
  mine_.clear();
}

}  // namespace dreamcomm

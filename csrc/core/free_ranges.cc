#include "core/free_ranges.h"

#include <iterator>

namespace dreamcomm {

std::optional<std::size_t> FreeRanges::take(std::size_t bytes) {
  auto best = free_.end();
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->second < bytes) continue;
    if (best == free_.end() || range->second < best->second) best = range;
  }
  if (best == free_.end()) return std::nullopt;
  const auto [offset, size] = *best;
  free_.erase(best);
  if (size > bytes) free_.emplace(offset + bytes, size - bytes);
  return offset;
}

void FreeRanges::give_back(std::size_t offset, std::size_t bytes) {
  const auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + bytes) {
    bytes += after->second;
    free_.erase(after);
  }
  const auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

}  // namespace dreamcomm

// Which parts of a range are free.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

namespace dreamcomm {

/// Deals out parts of [0, bytes). Not thread-safe.
class FreeRanges {
 public:
  explicit FreeRanges(std::size_t bytes) : free_{{0, bytes}} {}

  /// Where `bytes` bytes are free: in the smallest range that fits, of equal ones the
  /// lowest, which has likely been used before. Nothing if there is none.
  std::optional<std::size_t> take(std::size_t bytes);
  void give_back(std::size_t offset, std::size_t bytes);

 private:
  std::map<std::size_t, std::size_t> free_;  // offset -> bytes; no two touch
};

}  // namespace dreamcomm

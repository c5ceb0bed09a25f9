// Caches which row of the table serves a call.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <string>

#include "algorithms/table.h"

namespace dreamcomm {

struct Choice {
  std::size_t row = 0;
  bool asks = false;  // first asks whether tensors lie in heaps, then chooses again
};

/// Not thread-safe: one call of a group runs at a time.
class AlgorithmCache {
 public:
  AlgorithmCache(std::string algorithm, bool fixed_order, bool heaps)
      : algorithm_(std::move(algorithm)), fixed_order_(fixed_order), heaps_(heaps) {}

  bool heaps() const { return heaps_; }  // every rank has one
  const Costs& costs() const { return costs_; }
  void use(const Costs& costs) {
    costs_ = costs;
    remembered_ = {};
  }
  Preference preference() const { return {algorithm_, fixed_order_, &costs_}; }
  bool asks(const CallShape& call) const { return heaps_ && asks_for_heaps(call, preference()); }

  Choice choose(const CallShape& call) {
    Entry& entry = remembered_[place_of(call)];
    if (!entry.valid || !(entry.call == call)) {
      entry = {true, call, {pick(call, preference()), asks(call)}};
    }
    return entry.choice;
  }

 private:
  struct Entry {
    bool valid = false;
    CallShape call;
    Choice choice;
  };
  static constexpr std::size_t kEntries = 64;

  /// Multiplying spreads the low bits over the high ones. A call in heaps is looked up twice, with
  /// and without them. Each has its own place, or each would evict the other.
  static std::size_t place_of(const CallShape& call) {
    const std::size_t heaps = (call.in_heap ? 1U : 0U) + (call.out_heap ? 2U : 0U);
    const std::size_t what =
        (static_cast<std::size_t>(call.kind) * 32 + static_cast<std::size_t>(call.op)) * 4 + heaps;
    return (call.bytes * 2048 + what) * 0x9E3779B97F4A7C15U >> 58U;
  }
  static_assert(kEntries == std::size_t{1} << (64U - 58U));

  const std::string algorithm_;
  const bool fixed_order_;
  const bool heaps_;
  Costs costs_ = Costs::fixed();
  std::array<Entry, kEntries> remembered_;
};

}  // namespace dreamcomm

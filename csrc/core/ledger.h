// The last things that one writer noted, for readers that look while it goes on.
//
// INVARIANT: what read() returns is whole. A writer of place i publishes stamp 0, the words, and
// then a stamp that no earlier content of the place had. A reader reads the stamp, the words and
// the stamp again. If one word is of a later writing than the first stamp, then, as each of these
// reads acquires what the writes before the word released, the second stamp is that 0 or a later
// one: the two differ, and the reader looks again or leaves the place out.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#include "core/flag.h"

namespace dreamcomm {

template <typename T>
class Ledger {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(std::int64_t) == 0);
  using Words = std::array<std::int64_t, sizeof(T) / sizeof(std::int64_t)>;

 public:
  /// Keeps the last `places` things. Memory is taken as they are noted.
  explicit Ledger(std::size_t places)
      : places_(places), slots_(static_cast<Slot*>(std::calloc(places, sizeof(Slot)))) {
    if (places > 0 && !slots_) throw std::bad_alloc();
  }

  /// Of the one writer.
  void add(const T& thing) {
    if (places_ == 0) return;
    const std::int64_t number = added_.read() + 1;
    write(number, 0, thing);
    added_.publish(number);
    changes_ = 0;
  }
  /// The writer's: `thing` replaces what was added last.
  void amend(const T& thing) {
    if (places_ == 0 || added_.read() == 0) return;
    write(added_.read(), ++changes_, thing);
  }

  /// How many were added so far, kept or not.
  std::int64_t added() const { return added_.read(); }
  /// What is kept of those after the first `before`, the oldest first. Any thread.
  std::vector<T> read(std::int64_t before = 0) const {
    std::vector<T> kept;
    const std::int64_t last = added();
    const auto places = static_cast<std::int64_t>(places_);
    const std::int64_t first = std::max({std::int64_t{0}, before, last - places}) + 1;
    for (std::int64_t number = first; number <= last; ++number) {
      if (const std::optional<T> thing = look(number)) kept.push_back(*thing);
    }
    return kept;
  }

 private:
  static constexpr int kLooks = 100;  // a writer amends a place once in a call
  static constexpr int kChangeBits = 20;
  struct Slot {  // zeroed memory is one
    Mark stamp;  // 0: being written; else the number of the thing, and how often it changed
    std::array<Mark, std::tuple_size_v<Words>> words;
  };

  struct Free {
    void operator()(Slot* slots) const { std::free(slots); }
  };

  Slot& slot(std::int64_t number) const {
    return slots_[static_cast<std::size_t>(number) % places_];
  }

  void write(std::int64_t number, std::uint32_t changes, const T& thing) {
    const auto words = std::bit_cast<Words>(thing);
    Slot& place = slot(number);
    place.stamp.publish(0);
    for (std::size_t i = 0; i < words.size(); ++i) place.words[i].publish(words[i]);
    constexpr std::uint32_t kMost = (1U << kChangeBits) - 1;
    place.stamp.publish((number << kChangeBits) | (changes & kMost));
  }

  std::optional<T> look(std::int64_t number) const {
    const Slot& place = slot(number);
    for (int i = 0; i < kLooks; ++i) {
      const std::int64_t stamp = place.stamp.read();
      if (stamp >> kChangeBits > number) return std::nullopt;  // overwritten by now
      if (stamp >> kChangeBits != number) continue;
      Words words;
      for (std::size_t w = 0; w < words.size(); ++w) words[w] = place.words[w].read();
      if (place.stamp.read() == stamp) return std::bit_cast<T>(words);
    }
    return std::nullopt;
  }

  const std::size_t places_;
  const std::unique_ptr<Slot[], Free> slots_;
  Mark added_;
  std::uint32_t changes_ = 0;  // of the thing added last
};

}  // namespace dreamcomm

// A ring of the last things that one writer added. Readers read while it writes.
//
// INVARIANT: read() returns only things that are whole. A writer of place i publishes stamp 0, the
// words, and then a stamp that no earlier content of the place had. A reader reads the stamp, the
// words and the stamp again. Each of these reads acquires what the writes before it released. So if
// one word is of a later write than the first stamp, the second stamp is that 0 or a later one. The
// two stamps differ, and the reader reads again or skips the place.
//
// A thing converts itself to words (words(), and back with of()): it gathers them in registers. If
// it were copied as memory, its fields, written just before as smaller stores, would not be
// forwarded to the load. The load would wait until all earlier stores have left the processor,
// which is half of a trace's cost.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/flag.h"

namespace dreamcomm {

template <typename T>
class SeqlockRing {
  using Words = decltype(std::declval<const T&>().words());
  static constexpr std::size_t kWords = std::tuple_size_v<Words>;

 public:
  /// Keeps the last `places` things. Memory is taken as they are noted.
  explicit SeqlockRing(std::size_t places)
      : places_(places), memory_(std::calloc(places + 1, sizeof(Slot))) {
    std::size_t space = (places + 1) * sizeof(Slot);
    void* start = memory_.get();
    if (start == nullptr) throw std::bad_alloc();
    slots_ = static_cast<Slot*>(std::align(alignof(Slot), places * sizeof(Slot), start, space));
    if (slots_ == nullptr) throw std::bad_alloc();
  }

  /// Only the one writer calls this.
  void add(const T& thing) {
    if (places_ == 0) return;
    if (++place_ == places_) place_ = 0;
    changes_ = 0;
    const std::int64_t number = added_.read() + 1;
    write(number, thing);
    added_.publish(number);
  }
  /// Replaces the last added thing. Only the one writer calls this.
  void amend(const T& thing) {
    if (places_ == 0 || added_.read() == 0) return;
    ++changes_;
    write(added_.read(), thing);
  }

  /// How many were added so far, kept or not.
  std::int64_t added() const { return added_.read(); }
  /// Returns the kept things after the first `before`, the oldest first. Any thread.
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
  static constexpr std::size_t kCacheLine = 64;  // the lines of a long ring are cold when written
  struct alignas(kCacheLine) Slot {              // zeroed memory is one
    Mark stamp;  // 0: being written; else the number of the thing, and how often it changed
    std::array<Mark, kWords> words;
  };

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  void write(std::int64_t number, const T& thing) {
    const Words words = thing.words();
    Slot& place = slots_[place_];
    place.stamp.publish(0);
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (place.words[I].publish(words[I]), ...);
    }(std::make_index_sequence<kWords>());
    constexpr std::uint32_t kMost = (1U << kChangeBits) - 1;
    place.stamp.publish((number << kChangeBits) | (changes_ & kMost));
  }

  std::optional<T> look(std::int64_t number) const {
    const Slot& place = slots_[static_cast<std::size_t>(number) % places_];
    for (int i = 0; i < kLooks; ++i) {
      const std::int64_t stamp = place.stamp.read();
      if (stamp >> kChangeBits > number) return std::nullopt;  // overwritten by now
      if (stamp >> kChangeBits != number) continue;
      Words words;
      for (std::size_t w = 0; w < words.size(); ++w) words[w] = place.words[w].read();
      if (place.stamp.read() == stamp) return T::of(words);
    }
    return std::nullopt;
  }

  const std::size_t places_;
  const std::unique_ptr<void, Free> memory_;
  Slot* slots_ = nullptr;
  Mark added_;
  std::size_t place_ = 0;      // of the thing added last: its number, modulo places_
  std::uint32_t changes_ = 0;  // of that thing
};

}  // namespace dreamcomm

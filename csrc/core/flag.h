// The only atomics of the library: counters that one rank advances and others
// wait for, and the doorbell a sleeping rank is woken by.
//
// Each lives alone on its cache line, in memory that several processes map, so
// each must be lock-free and address-free; the asserts below check that.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace dreamcomm {

inline constexpr std::size_t kLine = 128;  // two 64-byte lines: prefetchers fetch pairs

/// True if a counter that reads `seen` has reached `target`. Counters only grow and wrap around;
/// the two are never 2^31 apart.
constexpr bool reached(std::uint32_t seen, std::uint32_t target) {
  return static_cast<std::int32_t>(seen - target) >= 0;
}

/// A number that one writer advances. Memory that the writer wrote before `publish` is visible to
/// every thread that reads the published value (release / acquire).
///
/// Both operations are sequentially consistent, because the doorbell needs it. A writer publishes
/// and then reads the number of sleepers; a sleeper announces itself and then reads the number. At
/// least one of the two sees the other.
class alignas(kLine) Flag {
 public:
  Flag() = default;
  explicit Flag(std::uint32_t start) : value_(start) {}
  std::uint32_t read() const { return value_.load(std::memory_order_seq_cst); }
  void publish(std::uint32_t value) { value_.store(value, std::memory_order_seq_cst); }
  /// Takes the next number; for counters with several writers in one process.
  std::uint32_t take() { return value_.fetch_add(1, std::memory_order_seq_cst); }
  bool has(std::uint32_t target) const { return reached(read(), target); }

 private:
  std::atomic<std::uint32_t> value_{0};
};

/// Where the threads of one rank sleep, and what their peers ring.
class alignas(kLine) Doorbell {
 public:
  /// Announces a sleeper; look at the awaited flags after this, then sleep.
  std::uint32_t approach() {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    return rings_.load(std::memory_order_seq_cst);
  }
  void leave() { sleepers_.fetch_sub(1, std::memory_order_seq_cst); }
  /// Sleeps until rung after `approach` returned `seen`, or for `longest`.
  void sleep(std::uint32_t seen, std::chrono::nanoseconds longest);
  /// Wakes all sleepers, if any. Call it after publishing what they wait for.
  void ring() {
    if (sleepers_.load(std::memory_order_seq_cst) != 0) [[unlikely]] {
      wake();
    }
  }

 private:
  void wake();
  std::atomic<std::uint32_t> rings_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

/// A number for observers and tools: it has no order with other memory.
class Gauge {
 public:
  void set(std::int64_t value) { value_.store(value, std::memory_order_relaxed); }
  void add(std::int64_t value) { value_.fetch_add(value, std::memory_order_relaxed); }
  /// The same, cheaper by a factor of five. No other thread may write at the time.
  void grow(std::int64_t value) { set(read() + value); }
  std::int64_t read() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> value_{0};
};

/// A number that also publishes what its writer wrote before (release / acquire).
class Mark {
 public:
  void publish(std::int64_t value) { value_.store(value, std::memory_order_release); }
  std::int64_t read() const { return value_.load(std::memory_order_acquire); }

 private:
  std::atomic<std::int64_t> value_{0};
};

/// A pointer that another thread sets, or null; ordered as Mark.
template <typename T>
class Signpost {
 public:
  void publish(T* target) { target_.store(target, std::memory_order_release); }
  T* read() const { return target_.load(std::memory_order_acquire); }

 private:
  std::atomic<T*> target_{nullptr};
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::int64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint32_t>) == 4);  // what a futex waits on
static_assert(sizeof(Flag) == kLine && sizeof(Doorbell) == kLine);

}  // namespace dreamcomm

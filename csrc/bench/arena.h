// A barrier for the ranks of a ceiling's trial, and each other's memory.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "bench/trial.h"
#include "core/cpus.h"
#include "core/error.h"
#include "core/flag.h"
#include "transport/wait.h"

namespace dreamcomm {

/// A collective that only moves bytes.
inline void move(Communicator& communicator, Kind kind, std::span<const Block> in,
                 std::span<const Block> out) {
  Request request;
  request.kind = kind;
  request.in = in;
  request.out = out;
  communicator.run(request);
}

/// The memory of every rank's heap, as mapped here, and a barrier over it.
class Arena {
 public:
  static constexpr std::size_t kStage = std::size_t{512} << 10;  // bytes of one buffer

  Arena(Communicator& communicator, Heap& heap, const Trial& trial)
      : comm_(communicator),
        interrupt_(trial.interrupt),
        memory_(heap.allocate(sizeof(Flag) + 4 * kStage)),
        size_(static_cast<std::size_t>(communicator.size())),
        self_(static_cast<std::size_t>(communicator.rank())) {
    if (memory_) new (memory_.get()) Flag();
    const std::array<std::byte*, 3> own{memory_.get(), trial.in.data, trial.out.data};
    for (std::size_t what = 0; what < own.size(); ++what) exchange(heap, own[what], what);
    // All ranks decide alike: a rank that threw alone would leave the others waiting for it.
    check(!is_missing(at_[0]), ErrorKind::kInvalid, "the ceiling needs ", 4 * kStage,
          " bytes of every rank's shared heap, and one is full");
  }

  std::size_t size() const { return size_; }
  std::size_t self() const { return self_; }
  Communicator& communicator() const { return comm_; }
  /// Two buffers for outgoing data, two for results; `round` chooses.
  std::byte* stage(std::size_t rank, std::size_t round) const {
    return at_[0][rank] + sizeof(Flag) + (round & 1) * kStage;
  }
  std::byte* result(std::size_t rank, std::size_t round) const {
    return at_[0][rank] + sizeof(Flag) + (2 + (round & 1)) * kStage;
  }
  std::byte* in(std::size_t rank) const { return at_[1][rank]; }
  std::byte* out(std::size_t rank) const { return at_[2][rank]; }
  bool all_in_heaps() const { return !is_missing(at_[1]) && !is_missing(at_[2]); }

  void barrier() {
    flag(self_).publish(++epoch_);
    for (std::size_t rank = 0; rank < size_; ++rank) {
      const auto ready = [&] { return flag(rank).has(epoch_); };
      for (std::uint64_t waits = 0; !spin_until(crowded_ ? kGlance : kSpins, ready); ++waits) {
        back_off(rank, waits);
      }
    }
  }

 private:
  static constexpr int kSpins = 2000;
  static constexpr int kGlance = 50;

  static bool is_missing(const std::vector<std::byte*>& all) {
    return std::find(all.begin(), all.end(), nullptr) != all.end();
  }

  Flag& flag(std::size_t rank) const {
    return *std::launder(reinterpret_cast<Flag*>(at_[0][rank]));
  }
  /// Yields at first, so that another rank runs. Then sleeps, so that the scheduler may move it
  /// here.
  void back_off(std::size_t rank, std::uint64_t waits) const {
    constexpr std::uint64_t kYields = 20;
    constexpr std::chrono::microseconds kNap{20};
    constexpr std::chrono::seconds kLongest{60};
    if (waits < kYields) {
      sched_yield();
      return;
    }
    if (interrupt_) interrupt_();
    std::this_thread::sleep_for(kNap);
    check(waits * kNap < kLongest, ErrorKind::kTimeout, "the ceiling waited in vain for rank ",
          rank);
  }
  /// Exchanges all ranks' addresses of one thing, null if it lies in no heap.
  void exchange(const Heap& heap, std::byte* own, std::size_t what) {
    std::uint64_t place = heap.holds(own) ? static_cast<std::uint64_t>(own - heap.data()) + 1 : 0;
    std::vector<std::uint64_t> places(size_);
    const Block in{reinterpret_cast<std::byte*>(&place), sizeof place};
    std::vector<Block> out;
    for (std::uint64_t& one : places) {
      out.push_back({reinterpret_cast<std::byte*>(&one), sizeof one});
    }
    move(comm_, Kind::kAllGather, {&in, 1}, out);
    for (std::size_t rank = 0; rank < size_; ++rank) {
      const std::span<std::byte> theirs = comm_.heap(static_cast<int>(rank));
      at_[what].push_back(places[rank] == 0 ? nullptr : theirs.data() + places[rank] - 1);
    }
  }

  Communicator& comm_;
  const Interrupt& interrupt_;
  std::shared_ptr<std::byte> memory_;
  std::size_t size_;
  std::size_t self_;
  const bool crowded_ = comm_.size() > usable_cpus();
  std::uint32_t epoch_ = 0;
  std::array<std::vector<std::byte*>, 3> at_;
};

}  // namespace dreamcomm

// Threads of the process as lanes: the kernels' bodies without a GPU.
//
// Slow, and not for users: it exists so that tests and sanitizers run what nvcc
// compiles, with as many ranks, blocks and lanes as a case asks for.
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace dreamcomm::gpu {

/// What the lanes of one block share.
class HostBlock {
 public:
  explicit HostBlock(int lanes) : lanes_(lanes), barrier_(lanes) {}

  std::size_t bytes_read() const { return read_; }
  std::size_t bytes_written() const { return written_; }
  /// Of one lane only.
  void count(std::size_t read, std::size_t written) {
    read_ += read;
    written_ += written;
  }

  int lanes() const { return lanes_; }
  void meet() { barrier_.arrive_and_wait(); }
  bool any(bool mine) {
    if (mine) flag_.store(true, std::memory_order_relaxed);
    meet();
    const bool result = flag_.load(std::memory_order_relaxed);
    meet();
    if (mine) flag_.store(false, std::memory_order_relaxed);
    meet();
    return result;
  }

 private:
  const int lanes_;
  std::barrier<> barrier_;
  std::atomic<bool> flag_{false};
  std::size_t read_ = 0;
  std::size_t written_ = 0;
};

/// One lane.
class HostTarget {
 public:
  HostTarget(HostBlock& shared, int lane, int block, int blocks)
      : shared_(shared), lane_(lane), block_(block), blocks_(blocks) {}

  int lane() const { return lane_; }
  int lanes() const { return shared_.lanes(); }
  int block() const { return block_; }
  int blocks() const { return blocks_; }
  void meet() const { shared_.meet(); }
  bool any(bool mine) const { return shared_.any(mine); }

  void publish(std::uint64_t* word, std::uint64_t value) const {
    std::atomic_ref(*word).store(value, std::memory_order_release);
  }
  std::uint64_t read(std::uint64_t* word) const {
    return std::atomic_ref(*word).load(std::memory_order_acquire);
  }
  bool claim(std::uint64_t* word, std::uint64_t value) const {
    std::uint64_t expected = 0;
    return std::atomic_ref(*word).compare_exchange_strong(expected, value);
  }
  std::uint64_t now() const {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
  }
  void pause() const { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  void count(std::size_t bytes, int reads, int writes) const {
    if (lane_ != 0) return;
    shared_.count(bytes * static_cast<std::size_t>(reads),
                  bytes * static_cast<std::size_t>(writes));
  }

 private:
  HostBlock& shared_;
  int lane_;
  int block_;
  int blocks_;
};

}  // namespace dreamcomm::gpu

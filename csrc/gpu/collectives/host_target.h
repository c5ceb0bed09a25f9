// Threads of the process as lanes: the kernels' bodies without a GPU.
//
// It is slow, and not for users. Tests and sanitizers use it to run the source that nvcc compiles,
// with as many ranks, blocks and lanes as a case needs.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "gpu/collectives/window.h"

namespace dreamcomm::gpu {

/// The state that the lanes of one block share. (It does not use std::barrier, whose counters are
/// shared by all barriers of a process: ThreadSanitizer does not see what they order.)
class HostBlock {
 public:
  explicit HostBlock(int lanes) : lanes_(lanes) {
    pthread_barrier_init(&barrier_, nullptr, static_cast<unsigned>(lanes));
  }
  ~HostBlock() { pthread_barrier_destroy(&barrier_); }
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  std::size_t bytes_read() const { return read_; }
  std::size_t bytes_written() const { return written_; }
  /// May be called by any lane.
  void count(std::size_t read, std::size_t written) {
    read_.fetch_add(read, std::memory_order_relaxed);
    written_.fetch_add(written, std::memory_order_relaxed);
  }

  int lanes() const { return lanes_; }
  void sync() { pthread_barrier_wait(&barrier_); }
  bool any(bool mine) {
    if (mine) flag_.store(true, std::memory_order_relaxed);
    sync();
    const bool result = flag_.load(std::memory_order_relaxed);
    sync();
    if (mine) flag_.store(false, std::memory_order_relaxed);
    sync();
    return result;
  }

 private:
  const int lanes_;
  pthread_barrier_t barrier_{};
  std::atomic<bool> flag_{false};
  std::atomic<std::size_t> read_{0};
  std::atomic<std::size_t> written_{0};
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
  void sync() const { shared_.sync(); }
  bool any(bool mine) const { return shared_.any(mine); }

  void publish(std::uint64_t* word, std::uint64_t value) const {
    std::atomic_ref(*word).store(value, std::memory_order_release);
  }
  std::uint64_t read(std::uint64_t* word) const {
    return std::atomic_ref(*word).load(std::memory_order_acquire);
  }
  // Releases, because here nothing else orders the accesses of the rank's earlier kernels. On a GPU
  // the end of a kernel does.
  void write_relaxed(std::uint64_t* word, std::uint64_t value) const { publish(word, value); }
  std::uint64_t read_relaxed(std::uint64_t* word) const {
    return std::atomic_ref(*word).load(std::memory_order_relaxed);
  }
  void write_packet(LLPacket* to, const LLPacket& packet) const {
    for (int i = 0; i < 2; ++i) write_relaxed(&to->half[i], packet.half[i]);
  }
  LLPacket read_packet(LLPacket* from) const {
    LLPacket packet;
    for (int i = 0; i < 2; ++i) {
      packet.half[i] = read_relaxed(&from->half[i]);
    }
    return packet;
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
    if (lane_ == 0) count_by_one(bytes, reads, writes);
  }
  void count_by_one(std::size_t bytes, int reads, int writes) const {
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

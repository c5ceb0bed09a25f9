// The operations that a kernel body needs from the machine that runs it.
//
// A kernel is a grid of blocks; a block is a team of lanes. Bodies are templates over the
// target. On the GPU (cuda/target.cuh) lanes are CUDA threads. On the host (host_target.h) they
// are threads of the process: the source that nvcc compiles also runs under the tests and
// sanitizers of a machine without a GPU.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "gpu/collectives/window.h"

namespace dreamcomm::gpu {

/// The operations that a loop shared by lanes needs.
template <typename L>
concept Lanes = requires(const L& lanes, std::size_t bytes, int reads, int writes) {
  { lanes.lane() } -> std::same_as<int>;   // of this thread, within its block
  { lanes.lanes() } -> std::same_as<int>;  // of a block
  // Counts that the lanes read `bytes` of memory `reads` times and write them `writes` times. All
  // lanes call it. Tests compare the counts with the formulas.
  lanes.count(bytes, reads, writes);
};

template <typename T>
concept Target = Lanes<T> && requires(const T& t, std::uint64_t* word, std::uint64_t value,
                                      bool flag, std::size_t bytes, int reads, int writes,
                                      LLPacket* packet, const LLPacket& content) {
  { t.block() } -> std::same_as<int>;   // of this thread
  { t.blocks() } -> std::same_as<int>;  // of the kernel
  // A barrier of the block's lanes: each lane's earlier writes are visible to all lanes after it.
  t.sync();
  // The same barrier; returns whether any lane passed true.
  { t.any(flag) } -> std::same_as<bool>;
  // Words in memory that other kernels or the host read. `publish` releases and `read` acquires,
  // among all processors that map the memory: a reader of the value sees what this lane saw and
  // wrote before.
  t.publish(word, value);
  { t.read(word) } -> std::same_as<std::uint64_t>;
  // The same without ordering other accesses of this kernel: only the value is transferred.
  t.write_relaxed(word, value);
  { t.read_relaxed(word) } -> std::same_as<std::uint64_t>;
  t.write_packet(packet, content);
  { t.read_packet(packet) } -> std::same_as<LLPacket>;
  // Changes a word that is 0 to `value`; returns whether this lane changed it.
  { t.claim(word, value) } -> std::same_as<bool>;
  { t.now() } -> std::same_as<std::uint64_t>;  // nanoseconds, of a clock that all lanes share
  t.pause();                                   // between two reads of a word that is polled
  t.count_by_one(bytes, reads, writes);        // like count(), but called by one lane
};

}  // namespace dreamcomm::gpu

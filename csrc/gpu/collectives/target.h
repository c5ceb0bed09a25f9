// What a kernel body asks of the machine that runs it.
//
// A kernel is a grid of blocks, each of which is a team of lanes. Bodies are templates
// over the target: on the GPU (cuda/target.cuh) lanes are CUDA threads; on the host
// (host_target.h) they are threads of the process, so that the very source that nvcc
// compiles runs under the tests and sanitizers of a machine without a GPU.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "gpu/collectives/window.h"

namespace dreamcomm::gpu {

/// What a loop needs that lanes share.
template <typename L>
concept Lanes = requires(const L& lanes, std::size_t bytes, int reads, int writes) {
  { lanes.lane() } -> std::same_as<int>;   // of this thread, within its block
  { lanes.lanes() } -> std::same_as<int>;  // of a block
  // They read `bytes` of memory `reads` times and write them `writes` times; for those who check
  // the formulas, told by all lanes.
  lanes.count(bytes, reads, writes);
};

template <typename T>
concept Target = Lanes<T> && requires(const T& t, std::uint64_t* word, std::uint64_t value,
                                      bool flag, std::size_t bytes, int reads, int writes,
                                      LLPacket* packet, const LLPacket& told) {
  { t.block() } -> std::same_as<int>;   // of this thread
  { t.blocks() } -> std::same_as<int>;  // of the kernel
  // All lanes of the block come here; what each wrote before, all see after.
  t.meet();
  // The same; whether any lane brought true.
  { t.any(flag) } -> std::same_as<bool>;
  // Words in memory that other kernels or the host read. What this lane saw and wrote
  // before `publish` is seen by whoever reads the value: release and acquire, among
  // all processors that map the memory.
  t.publish(word, value);
  { t.read(word) } -> std::same_as<std::uint64_t>;
  // The same without an order among what this kernel accesses: what is told is the value alone.
  t.tell(word, value);
  { t.peek(word) } -> std::same_as<std::uint64_t>;
  t.write_packet(packet, told);
  { t.read_packet(packet) } -> std::same_as<LLPacket>;
  // Takes a word from 0 to `value`; whether it was this lane that did.
  { t.claim(word, value) } -> std::same_as<bool>;
  { t.now() } -> std::same_as<std::uint64_t>;  // nanoseconds, of a clock that all lanes share
  t.pause();                                   // between two looks at a word
  t.count_by_one(bytes, reads, writes);        // told by one lane
};

}  // namespace dreamcomm::gpu

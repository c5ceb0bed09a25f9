// What a kernel body asks of the machine that runs it.
//
// A kernel is a grid of blocks, each of which is a team of lanes. Bodies are templates
// over the target: on the GPU (cuda_target.cuh) lanes are CUDA threads; on the host
// (host_target.h) they are threads of the process, so that the very source that nvcc
// compiles runs under the tests and sanitizers of a machine without a GPU.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace dreamcomm::gpu {

template <typename T>
concept Target = requires(const T& t, std::uint64_t* word, std::uint64_t value, bool flag,
                          std::size_t bytes, int reads, int writes) {
  { t.lane() } -> std::same_as<int>;    // of this thread, within its block
  { t.lanes() } -> std::same_as<int>;   // of a block
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
  // Takes a word from 0 to `value`; whether it was this lane that did.
  { t.claim(word, value) } -> std::same_as<bool>;
  { t.now() } -> std::same_as<std::uint64_t>;  // nanoseconds, of a clock that all lanes share
  t.pause();                                   // between two looks at a word
  // The block reads `bytes` of memory `reads` times and writes them `writes` times; for
  // those who check the formulas, told by all lanes.
  t.count(bytes, reads, writes);
};

}  // namespace dreamcomm::gpu

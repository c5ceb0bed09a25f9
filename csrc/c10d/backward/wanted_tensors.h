// Tensors that are placed in the process's heap when they are made.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "transport/shm/heap.h"

namespace dreamcomm {

class WantedTensors;

/// How many tensors of one size are wanted at a time, and live.
struct WantedSize {
  int wanted = 0;
  std::atomic<int> live = 0;
};

/// A tensor's memory in the heap.
struct PlacedMemory {
  PlacedMemory(std::shared_ptr<std::byte> memory_, std::shared_ptr<WantedTensors> wanted_,
               WantedSize* size_)
      : memory(std::move(memory_)), wanted(std::move(wanted_)), size(size_) {}
  PlacedMemory(PlacedMemory&&) = default;
  PlacedMemory& operator=(PlacedMemory&&) = delete;
  ~PlacedMemory();

  std::shared_ptr<std::byte> memory;
  std::shared_ptr<WantedTensors> wanted;  // keeps `size`
  WantedSize* size;
};

/// How many tensors of which sizes are wanted in a heap at a time. Thread-safe.
class WantedTensors : public std::enable_shared_from_this<WantedTensors> {
 public:
  /// `wanted`: how many for each number of bytes.
  WantedTensors(std::shared_ptr<Heap> heap, const std::map<std::size_t, int>& wanted);
  /// Nothing where `bytes` is not wanted, or as many live already.
  std::optional<PlacedMemory> allocate(std::size_t bytes);

 private:
  const std::shared_ptr<Heap> heap_;
  std::map<std::size_t, WantedSize> sizes_;  // its keys never change
};

/// Places this thread's new CPU tensors in a heap where they are wanted; null ends that. The first
/// call puts an allocator in front of torch's, which passes on what is not wanted.
void place_new_tensors(std::shared_ptr<WantedTensors> wanted);

}  // namespace dreamcomm

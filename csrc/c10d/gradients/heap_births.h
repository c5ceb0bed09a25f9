// Gradients born in the heap. While a backward pass runs, new tensors of the sizes of gradients get
// memory of the process's heap, so that no copy stands between autograd and the collective.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "transport/shm/heap.h"

namespace dreamcomm {

class HeapBirths;

/// How many tensors of one size are wanted at a time, and live.
struct BirthSize {
  int wanted = 0;
  std::atomic<int> live = 0;
};

/// A tensor's memory in the heap.
struct Birth {
  Birth(std::shared_ptr<std::byte> memory_, std::shared_ptr<HeapBirths> births_, BirthSize* size_)
      : memory(std::move(memory_)), births(std::move(births_)), size(size_) {}
  Birth(Birth&&) = default;
  Birth& operator=(Birth&&) = delete;
  ~Birth();

  std::shared_ptr<std::byte> memory;
  std::shared_ptr<HeapBirths> births;  // keeps `size`
  BirthSize* size;
};

/// How many tensors of which sizes are wanted from a heap at a time. Thread-safe.
class HeapBirths : public std::enable_shared_from_this<HeapBirths> {
 public:
  /// `wanted`: how many for each number of bytes.
  HeapBirths(std::shared_ptr<Heap> heap, const std::map<std::size_t, int>& wanted);
  /// Nothing where `bytes` is not wanted, or as many live already.
  std::optional<Birth> allocate(std::size_t bytes);

 private:
  const std::shared_ptr<Heap> heap_;
  std::map<std::size_t, BirthSize> sizes_;  // its keys never change
};

/// Lets this thread's new CPU tensors be born in a heap; null ends that. The first call puts an
/// allocator in front of torch's, which passes on what is not wanted.
void set_heap_births(std::shared_ptr<HeapBirths> births);

}  // namespace dreamcomm

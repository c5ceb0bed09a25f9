// Gradients born in the heap. While a backward pass runs, new tensors of the sizes of gradients get
// memory of the process's heap, so that no copy stands between autograd and the collective.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>

#include "transport/shm/heap.h"

namespace dreamcomm {

/// How many tensors of which sizes are wanted from a heap at a time. Thread-safe.
class HeapBirths : public std::enable_shared_from_this<HeapBirths> {
 public:
  /// `wanted`: how many for each number of bytes.
  HeapBirths(std::shared_ptr<Heap> heap, const std::map<std::size_t, int>& wanted);
  /// Memory of the heap, or null where `bytes` is not wanted, or as many live already.
  c10::DataPtr allocate(std::size_t bytes);

 private:
  struct Size {
    int wanted = 0;
    std::atomic<int> live = 0;
  };
  struct Birth;  // what a tensor's storage owns

  const std::shared_ptr<Heap> heap_;
  std::map<std::size_t, Size> sizes_;  // its keys never change
};

/// Lets this thread's new CPU tensors be born in a heap; null ends that. The first call puts an
/// allocator in front of torch's, which passes on what is not wanted.
void set_heap_births(std::shared_ptr<HeapBirths> births);

}  // namespace dreamcomm

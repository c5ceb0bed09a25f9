#include "c10d/process_heap.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <mutex>
#include <utility>

#include "c10d/fork_mark.h"

namespace dreamcomm {
namespace {

/// The one thing all groups of a process share, as their tensors are its tensors.
struct Current {
  std::mutex mutex;
  std::weak_ptr<Heap> heap;
  std::unique_ptr<ForkMark> maker;
};

Current& current() {
  static Current only;
  return only;
}

}  // namespace

std::shared_ptr<Heap> process_heap(std::size_t bytes) {
  Current& now = current();
  const std::scoped_lock lock(now.mutex);
  std::shared_ptr<Heap> heap = now.heap.lock();
  if (heap && now.maker->at_home()) return heap;
  heap = Heap::make(bytes);
  now.heap = heap;
  now.maker = std::make_unique<ForkMark>();
  return heap;
}

std::shared_ptr<Heap> live_process_heap() {
  Current& now = current();
  const std::scoped_lock lock(now.mutex);
  std::shared_ptr<Heap> heap = now.heap.lock();
  return heap && now.maker->at_home() ? heap : nullptr;
}

at::Tensor allocate_tensor(Heap& heap, std::int64_t size, const at::TensorOptions& options) {
  auto memory = heap.allocate(static_cast<std::size_t>(size) * options.dtype().itemsize());
  if (!memory) return at::empty({size}, options);  // collectives stage it
  void* data = memory.get();
  return at::from_blob(data, {size}, [memory = std::move(memory)](void*) {}, options);
}

}  // namespace dreamcomm

#include "c10d/process_heap.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/safe_numerics.h>

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
  try {
    heap = Heap::make(bytes);
  } catch (const Error& error) {
    throw Error(error.kind(), concat(error.what(), "; the option heap_bytes, or the environment ",
                                     "variable DREAMCOMM_HEAP_BYTES, asks for ", bytes, " bytes"));
  }
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

std::uint64_t bytes_of(std::int64_t size, const at::TensorOptions& options) {
  TORCH_CHECK_VALUE(size >= 0, "expected a size from 0 on, got ", size);
  TORCH_CHECK_VALUE(!c10::isQIntType(options.dtype().toScalarType()),
                    "shared tensors are not quantized, got ", options.dtype());
  std::uint64_t bytes = 0;
  const bool overflows = c10::mul_overflows(static_cast<std::uint64_t>(size),
                                            std::uint64_t{options.dtype().itemsize()}, &bytes);
  TORCH_CHECK_VALUE(!overflows, "expected a size of less than 2^64 bytes, got ", size,
                    " elements of ", options.dtype());
  return bytes;
}

at::Tensor allocate_tensor(Heap& heap, std::int64_t size, const at::TensorOptions& options) {
  auto memory = heap.allocate(bytes_of(size, options));
  if (!memory) return at::empty({size}, options);  // collectives stage it
  void* data = memory.get();
  return at::from_blob(data, {size}, [memory = std::move(memory)](void*) {}, options);
}

}  // namespace dreamcomm

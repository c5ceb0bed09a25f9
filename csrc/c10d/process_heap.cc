#include "c10d/process_heap.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/safe_numerics.h>

#include <utility>

#include "c10d/process_wide.h"

namespace dreamcomm {
namespace {

/// All groups' tensors are the process's tensors.
ProcessWide<Heap>& current() {
  static ProcessWide<Heap> only;
  return only;
}

std::shared_ptr<Heap> make_heap(std::size_t bytes) {
  try {
    return Heap::make(bytes);
  } catch (const NoSharedMemory& error) {
    throw NoSharedMemory(concat(error.what(), "; the option heap_bytes, or the environment ",
                                "variable DREAMCOMM_HEAP_BYTES, asks for ", bytes, " bytes"));
  }
}

}  // namespace

std::shared_ptr<Heap> process_heap(std::size_t bytes) {
  return current().get_or([bytes] { return make_heap(bytes); });
}

std::shared_ptr<Heap> live_process_heap() { return current().get(); }

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

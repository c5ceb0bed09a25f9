#include "c10d/process/process_heap.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/safe_numerics.h>

#include <utility>

#include "c10d/process/process_singleton.h"

namespace dreamcomm {
namespace {

/// All groups' tensors are the process's tensors.
ProcessSingleton<Heap>& current() {
  static ProcessSingleton<Heap> only;
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

/// Memory of the heap as torch's storages own it.
c10::DataPtr in_storage(std::shared_ptr<std::byte> memory) {
  auto* const owner = new std::shared_ptr<std::byte>(std::move(memory));
  return {owner->get(), owner,
          [](void* held) { delete static_cast<std::shared_ptr<std::byte>*>(held); },
          c10::Device(c10::DeviceType::CPU)};
}

/// Resizes storages: in the process's heap, or in ordinary memory if there is none or it is full.
/// It outlives all storages, which keep pointers to it.
class HeapAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const std::shared_ptr<Heap> heap = live_process_heap();
    std::shared_ptr<std::byte> memory = heap ? heap->allocate(bytes) : nullptr;
    return memory ? in_storage(std::move(memory)) : c10::GetCPUAllocator()->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

HeapAllocator& allocator() {
  static HeapAllocator* const only = new HeapAllocator;
  return *only;
}

}  // namespace

std::shared_ptr<Heap> process_heap(std::size_t bytes) {
  return current().get_or([bytes] { return make_heap(bytes); });
}

std::shared_ptr<Heap> live_process_heap() { return current().get(); }

bool is_in_heap(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.numel() == 0) return false;
  const std::shared_ptr<Heap> heap = live_process_heap();
  return heap && heap->holds(static_cast<const std::byte*>(tensor.const_data_ptr()));
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
  c10::DataPtr owned = in_storage(std::move(memory));
  void* const data = owned.get();
  const c10::DeleterFnPtr deleter = owned.get_deleter();
  return at::for_blob(data, {size})
      .context(owned.release_context(), deleter)
      .options(options)
      .allocator(&allocator())
      .resizeable_storage()
      .make_tensor();
}

}  // namespace dreamcomm

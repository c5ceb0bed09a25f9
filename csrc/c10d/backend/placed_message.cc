#include "c10d/backend/placed_message.h"

#include <cstring>
#include <utility>

#include "c10d/backend/backend.h"
#include "c10d/base/check_args.h"
#include "c10d/base/op_labels.h"
#include "c10d/process/process_heap.h"

namespace dreamcomm {

PlacedMessage::PlacedMessage(std::shared_ptr<Heap> heap, std::shared_ptr<std::byte> memory,
                             std::size_t bytes)
    : heap_(std::move(heap)), memory_(std::move(memory)), bytes_(bytes) {}

std::unique_ptr<PlacedMessage> PlacedMessage::copy_of(const at::Tensor& tensor,
                                                      std::shared_ptr<Heap> heap) {
  const std::size_t bytes = tensor.nbytes();
  std::shared_ptr<std::byte> memory = heap->allocate(space_for(bytes));
  if (!memory) return nullptr;
  std::memcpy(memory.get(), tensor.const_data_ptr(), bytes);
  flag(memory.get(), bytes).store(0, std::memory_order_relaxed);
  return std::unique_ptr<PlacedMessage>(
      new PlacedMessage(std::move(heap), std::move(memory), bytes));
}

PlacedMessage::~PlacedMessage() {
  if (!taken()) heap_->retire(memory_.get());
}

void PlacedMessage::take(std::byte* from, std::size_t bytes, void* to) {
  std::memcpy(to, from, bytes);
  flag(from, bytes).store(1, std::memory_order_release);
}

std::unique_ptr<PlacedMessage> DreamBackend::place(const Tensor& tensor) const {
  const Site site = at(kSend);
  require_dense(site, "tensor", tensor);
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.is_contiguous(), site,
                    "expected a contiguous tensor of the CPU");
  return shares_heaps() ? PlacedMessage::copy_of(tensor, heap_) : nullptr;
}

at::Tensor DreamBackend::take_placed(int source, std::int64_t offset, at::IntArrayRef shape,
                                     at::ScalarType dtype) const {
  const Site site = at(kRecv);
  require_open();
  require_rank(site, "source", source);
  TORCH_CHECK_VALUE(shares_heaps(), site, "the ranks do not map each other's heaps");
  const Tensor into =
      allocate_tensor(*heap_, c10::multiply_integers(shape), at::TensorOptions().dtype(dtype))
          .view(shape);
  const std::span<std::byte> heap = single_host("placed messages lie in memory").heap(source);
  const auto begin = static_cast<std::size_t>(offset);
  TORCH_CHECK_VALUE(offset >= 0 && begin <= heap.size() &&
                        PlacedMessage::space_for(into.nbytes()) <= heap.size() - begin,
                    site, "no message of ", into.nbytes(), " bytes can lie at ", offset,
                    " of the heap of rank ", source);
  PlacedMessage::take(heap.data() + begin, into.nbytes(), into.mutable_data_ptr());
  return into;
}

}  // namespace dreamcomm

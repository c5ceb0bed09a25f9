#include "c10d/messages/placed_message.h"

#include <algorithm>
#include <utility>

namespace dreamcomm {

PlacedMessage::PlacedMessage(std::shared_ptr<Heap> heap, std::shared_ptr<std::byte> memory,
                             std::size_t bytes)
    : heap_(std::move(heap)), memory_(std::move(memory)), bytes_(bytes) {}

std::unique_ptr<PlacedMessage> PlacedMessage::copy_of(std::span<const std::byte> bytes,
                                                      std::shared_ptr<Heap> heap) {
  std::shared_ptr<std::byte> memory = heap->allocate(space_for(bytes.size()));
  if (!memory) return nullptr;
  std::copy(bytes.begin(), bytes.end(), memory.get());
  flag(memory.get(), bytes.size()).store(0, std::memory_order_relaxed);
  return std::unique_ptr<PlacedMessage>(
      new PlacedMessage(std::move(heap), std::move(memory), bytes.size()));
}

PlacedMessage::~PlacedMessage() {
  if (!taken()) heap_->retire(memory_.get());
}

void PlacedMessage::take(std::byte* from, std::size_t bytes, void* to) {
  std::copy_n(from, bytes, static_cast<std::byte*>(to));
  flag(from, bytes).store(1, std::memory_order_release);
}

}  // namespace dreamcomm

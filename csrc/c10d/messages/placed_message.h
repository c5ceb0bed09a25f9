// A tensor of a message in the sender's heap, from where its receiver copies it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "transport/shm/heap.h"

namespace dreamcomm {

/// The copy that a sender keeps until its receiver has taken it. A flag lies behind the bytes.
///
/// INVARIANT: the sender writes the bytes and the flag, and then announces them in a message. The
/// receiver reads the bytes after it has that message, and sets the flag last. The sender uses the
/// memory again only after it has seen the flag. A copy that goes away before is retired: its
/// receiver may still write the flag.
class PlacedMessage {
 public:
  using Flag = std::uint32_t;

  /// The bytes of a flag and of `bytes` before it, with the flag aligned.
  static std::size_t space_for(std::size_t bytes) { return flag_at(bytes) + sizeof(Flag); }

  /// Copies bytes into the heap; null if that is full.
  static std::unique_ptr<PlacedMessage> copy_of(std::span<const std::byte> bytes,
                                                std::shared_ptr<Heap> heap);
  ~PlacedMessage();
  PlacedMessage(const PlacedMessage&) = delete;
  PlacedMessage& operator=(const PlacedMessage&) = delete;

  std::int64_t offset() const { return memory_.get() - heap_->data(); }
  std::size_t bytes() const { return bytes_; }
  bool taken() const { return flag(memory_.get(), bytes_).load(std::memory_order_acquire) != 0; }

  /// The receiver's part: copies `bytes` from a place in the sender's heap, and sets the flag.
  static void take(std::byte* from, std::size_t bytes, void* to);

 private:
  PlacedMessage(std::shared_ptr<Heap> heap, std::shared_ptr<std::byte> memory, std::size_t bytes);
  static std::size_t flag_at(std::size_t bytes) {
    return (bytes + sizeof(Flag) - 1) / sizeof(Flag) * sizeof(Flag);
  }
  static std::atomic_ref<Flag> flag(std::byte* at, std::size_t bytes) {
    return std::atomic_ref<Flag>(*reinterpret_cast<Flag*>(at + flag_at(bytes)));
  }

  std::shared_ptr<Heap> heap_;
  std::shared_ptr<std::byte> memory_;
  std::size_t bytes_;
};

}  // namespace dreamcomm

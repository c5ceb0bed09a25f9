// Tensors in the registered memory of a device's group.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/free_ranges.h"

namespace dreamcomm {

/// Deals out memory that peers read and write in place. A tensor's memory is used again
/// when the work is done on the streams that were current where it was made and where it was
/// dropped. Peers have finished with it when the calls on it are done, so a caller must wait for a
/// call before it drops the call's tensors. Memory that is dropped while a graph is captured is not
/// used again: replays may use it. Thread-safe.
class DeviceHeap : public std::enable_shared_from_this<DeviceHeap> {
 public:
  using IsCapturing = std::function<bool(const c10::Stream&)>;
  DeviceHeap(std::shared_ptr<std::byte> memory, std::size_t bytes, c10::Device device,
             IsCapturing is_capturing);

  /// A tensor of one dimension, or an undefined one if the heap is full, or a graph captured.
  /// Resizing its storage moves it into torch's own memory.
  at::Tensor allocate(std::int64_t size, const at::TensorOptions& options);
  bool holds(const void* address) const;
  std::string describe() const;

 private:
  struct Dropped {
    std::size_t offset;
    std::size_t bytes;
    std::vector<std::shared_ptr<const c10::Event>> users;
  };
  static constexpr std::size_t kAlign = 256;

  void drop(std::size_t offset, std::size_t bytes, const c10::Stream& maker);
  void sweep();

  const std::shared_ptr<std::byte> memory_;
  const std::size_t bytes_;
  const c10::Device device_;
  const IsCapturing is_capturing_;
  mutable std::mutex mutex_;
  FreeRanges free_;
  std::vector<Dropped> dropped_;
  std::size_t in_use_ = 0;
  std::size_t refused_ = 0;
};

}  // namespace dreamcomm

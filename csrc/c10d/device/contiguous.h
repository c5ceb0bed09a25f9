// A call's blocks as one run of memory, as the kernels for accelerators need them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <span>

#include "core/request.h"

namespace dreamcomm {

/// A device's memory as a tensor, which does not keep it.
at::Tensor tensor_at(const std::byte* data, std::size_t count, at::ScalarType type,
                     c10::Device device);
inline at::Tensor bytes_at(const Block& block, c10::Device device) {
  return tensor_at(block.data, block.bytes, at::kByte, device);
}

/// Blocks that lie one after the other stay; others get a temporary on the device, which
/// belongs to the current stream, as do the copies.
class Contiguous {
 public:
  Contiguous(std::span<const Block> blocks, c10::Device device);

  std::span<const Block> blocks() const { return {blocks_.data(), blocks_.size()}; }
  /// Copy into the temporary, if there is one, and out of it.
  void collect() const { copy_all(true); }
  void spread() const { copy_all(false); }

 private:
  void copy_all(bool in) const;

  std::span<const Block> given_;
  c10::Device device_;
  c10::SmallVector<Block, 8> blocks_;
  at::Tensor memory_;
};

}  // namespace dreamcomm

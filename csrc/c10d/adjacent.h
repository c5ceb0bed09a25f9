// A call's blocks as one run of memory, which the kernels for accelerators want.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <span>

#include "core/request.h"

namespace dreamcomm {

/// Blocks that lie one after the other stay; others get a temporary on the device, which
/// belongs to the current stream, as do the copies.
class Adjacent {
 public:
  Adjacent(std::span<const Block> blocks, c10::Device device);

  std::span<const Block> blocks() const { return {blocks_.data(), blocks_.size()}; }
  /// Into the temporary, if there is one, and out of it.
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

// Memory of whole parameters, which they have while ranks use them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dreamcomm {

/// Gives each tensor's storage the memory of `block`, bytes on the CPU, from its offset on, and
/// keeps the block until it is taken back. Views that autograd has saved follow, and no version
/// counts up. Throws c10::ValueError unless each tensor is dense, begins its storage, and has room.
void lend(const std::vector<at::Tensor>& tensors, const at::Tensor& block,
          const std::vector<std::int64_t>& offsets);

/// Leaves the storages without memory.
void take_back(const std::vector<at::Tensor>& tensors);

/// The bytes of a tensor's storage from its first element on, as a tensor on the same storage.
/// Throws c10::ValueError if there are fewer than `count`.
at::Tensor bytes_of(const at::Tensor& tensor, std::int64_t count);

}  // namespace dreamcomm

// The heap of this process, one for all of its groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/shm/heap.h"

namespace dreamcomm {

/// The heap there is, or a new one of `bytes`; it lives as long as a group or a
/// tensor uses it. A forked child gets one of its own. Any thread.
std::shared_ptr<Heap> process_heap(std::size_t bytes);

/// The heap there is, or null.
std::shared_ptr<Heap> live_process_heap();

/// True if the memory of a dense CPU tensor lies in the heap there is.
bool is_in_heap(const at::Tensor& tensor);

/// The bytes of a tensor of one dimension in any heap. Throws c10::ValueError for sizes and types
/// that no heap has.
std::uint64_t bytes_of(std::int64_t size, const at::TensorOptions& options);

/// A tensor of one dimension in the heap; in ordinary memory if that is full. Like any tensor's its
/// storage can be resized.
at::Tensor allocate_tensor(Heap& heap, std::int64_t size, const at::TensorOptions& options);

}  // namespace dreamcomm

// Tensors of the accelerator for tests.
#pragma once

#include <ATen/core/Tensor.h>

#include "streams.h"

namespace dreamcomm::testing {

/// A tensor on the current device, whose memory belongs to the current stream. When the tensor is
/// dropped, its memory is overwritten as soon as that stream, and those of use_memory_on, have
/// finished their work. So code that still uses it then computes wrong results.
at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type);

/// Records a stream that uses a tensor, as torch's allocators do.
void use_memory_on(const c10::DataPtr& data, Queue& queue);

/// The same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor);

}  // namespace dreamcomm::testing

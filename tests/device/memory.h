// Tensors of the accelerator for tests.
#pragma once

#include <ATen/core/Tensor.h>

#include "streams.h"

namespace dreamcomm::testing {

/// A tensor on the current device, whose memory belongs to the current stream: when it is
/// dropped, it is overwritten as soon as that stream, and those of use_memory_on, are
/// through with what they have been given. Who still uses it then will see it.
at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type);

/// As torch's allocators do when told of a stream that uses a tensor.
void use_memory_on(const c10::DataPtr& data, Queue& queue);

/// The same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor);

}  // namespace dreamcomm::testing

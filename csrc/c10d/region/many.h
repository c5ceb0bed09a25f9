// Facts of many tensors, at once: Python takes half a microsecond to ask one of a subclass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dreamcomm {

/// Tensor._version of each. Throws for those made in inference mode, which have none.
std::vector<std::int64_t> versions_of(const std::vector<at::Tensor>& tensors);

/// The address of each one's storage, which `.data =` changes.
std::vector<std::uintptr_t> storages_of(const std::vector<at::Tensor>& tensors);

/// Each one's memory in the shape of another tensor, which has as many elements without gaps, in
/// any order of dimensions. Undefined ones stay.
std::vector<at::Tensor> placed_as(const std::vector<at::Tensor>& flat,
                                  const std::vector<at::Tensor>& likes);

}  // namespace dreamcomm

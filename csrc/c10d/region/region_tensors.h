// Tensors on memory that the ranks of a host share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/shm/region.h"

namespace dreamcomm {

/// A CPU tensor from byte `offset` of the region on, with a storage of its own that begins and ends
/// with it: so it shares memory with no other tensor, as far as torch can see. It keeps the region
/// alive. Throws c10::ValueError unless its elements are dense, do not overlap, and lie within the
/// region. `writable`: on Region::data(); else on Region::whole().
at::Tensor region_tensor(const std::shared_ptr<Region>& region, std::int64_t offset,
                         at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                         bool writable);

/// The region that the tensor lies in, or null. Views of a region's tensor lie in it, too.
std::shared_ptr<Region> region_of(const at::Tensor& tensor);

// As Region's, for the tensors that lie in files; others stay as they are. Neighbours in a file are
// taken together, and what lies between the elements of a tensor with gaps is taken, too.
void write_files(const std::vector<at::Tensor>& tensors);
void drop_files(const std::vector<at::Tensor>& tensors);
void read_files(const std::vector<at::Tensor>& tensors);

/// Gives `tensor` the version counter of `owner`: autograd then notices a write to either in place,
/// as for tensors of one storage.
void share_version(const at::Tensor& tensor, const at::Tensor& owner);

}  // namespace dreamcomm

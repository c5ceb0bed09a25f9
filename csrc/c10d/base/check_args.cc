#include "c10d/base/check_args.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "c10d/base/convert.h"

namespace dreamcomm {
namespace {

/// How many elements lie before the tensor's last one, from its first on. The tensor must have one.
std::int64_t last_element(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return last;
}

/// `untyped_storage().resize_(0)` frees a tensor's memory, and leaves the tensor as large as it
/// was.
void require_memory(const Site& site, const char* argument, const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.has_storage()) return;
  const std::size_t last = static_cast<std::size_t>(
      tensor.storage_offset() +
      (tensor.is_contiguous() ? tensor.numel() - 1 : last_element(tensor)));
  const std::size_t needed = (last + 1) * tensor.itemsize();
  const std::size_t there = tensor.storage().nbytes();
  TORCH_CHECK_VALUE(there >= needed, site, "expected '", argument,
                    "' to have memory, got one whose storage was freed: it has ", there,
                    " bytes, the tensor needs ", needed);
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Site& site) {
  return out << "rank " << site.rank << " of " << site.size << ": " << site.call << ": ";
}

void require_dense(const Site& site, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), site, "expected '", argument,
                    "' to be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, site, "expected '", argument,
                    "' to be dense, got a tensor of layout ", tensor.layout());
  require_memory(site, argument, tensor);
}

void require_writable(const Site& site, const char* argument, const at::Tensor& tensor) {
  require_dense(site, argument, tensor);
  TORCH_CHECK_VALUE(
      tensor.is_contiguous() || at::has_internal_overlap(tensor) != at::MemOverlap::Yes, site,
      "expected '", argument,
      "' to have memory of its own for each element, got a tensor of shape ", tensor.sizes(),
      " with strides ", tensor.strides(), "; clone() it first");
}

void require_length(const Site& site, const char* argument, std::size_t got, std::size_t length) {
  TORCH_CHECK_VALUE(got == length, site, "expected '", argument, "' to be a list of ", length,
                    ", got ", got);
}

void require_same_device(const Site& site, const char* argument, const at::Tensor& tensor,
                         const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), site, "expected '", argument, "' on ",
                    like.device(), " like the call's other tensors, got a tensor on ",
                    tensor.device());
}

void require_same_type(const Site& site, const char* argument, const at::Tensor& tensor,
                       const at::Tensor& like) {
  require_same_device(site, argument, tensor, like);
  TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type(), site, "expected '", argument,
                    "' of type ", type_name(like.scalar_type()),
                    " like the call's other tensors, got ", type_name(tensor.scalar_type()));
}

void require_match(const Site& site, const char* argument, const at::Tensor& tensor,
                   const at::Tensor& like, std::int64_t numel) {
  require_same_type(site, argument, tensor, like);
  TORCH_CHECK_VALUE(tensor.numel() == numel, site, "expected '", argument, "' to hold ", numel,
                    " elements (the other side has shape ", like.sizes(), "), got ", tensor.numel(),
                    " in shape ", tensor.sizes());
}

int require_rank(const Site& site, const char* argument, std::int64_t rank) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < site.size, site, "expected '", argument,
                    "' to be a rank of the group, 0 to ", site.size - 1, ", got ", rank);
  return static_cast<int>(rank);
}

int require_peer(const Site& site, const char* argument, int peer) {
  require_rank(site, argument, peer);
  TORCH_CHECK_VALUE(peer != site.rank, site, "expected '", argument,
                    "' to be another rank, got this one");
  return peer;
}

std::uint64_t require_tag(const Site& site, int tag) {
  TORCH_CHECK_VALUE(tag >= 0, site, "Tag must be nonnegative, got ", tag);
  return static_cast<std::uint64_t>(tag);
}

std::vector<std::size_t> split_bytes(const Site& site, const char* argument,
                                     const at::Tensor& tensor, c10::ArrayRef<std::int64_t> splits) {
  const auto size = static_cast<std::size_t>(site.size);
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % site.size == 0, site, "expected the first dimension of '", argument,
                      "' to be a multiple of the group's size ", site.size, ", got shape ",
                      tensor.sizes(), "; or give split sizes");
    return std::vector<std::size_t>(size, tensor.nbytes() / size);
  }
  require_length(site, argument, splits.size(), size);
  const std::size_t row = rows == 0 ? 0 : tensor.nbytes() / static_cast<std::size_t>(rows);
  std::vector<std::size_t> bytes;
  std::int64_t sum = 0;
  for (const std::int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0 && split <= rows, site, "expected split sizes of '", argument,
                      "' from 0 to its first dimension, ", rows, ", got ", splits);
    sum += split;
    bytes.push_back(static_cast<std::size_t>(split) * row);
  }
  TORCH_CHECK_VALUE(sum == rows, site, "expected the split sizes of '", argument,
                    "' to add up to its first dimension, ", rows, ", got ", splits);
  return bytes;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto range = [](const at::Tensor& t) {
    const auto begin = reinterpret_cast<std::uintptr_t>(t.const_data_ptr());
    return std::pair(begin, begin + static_cast<std::size_t>(last_element(t) + 1) * t.itemsize());
  };
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

bool any_overlap(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<at::Tensor> sorted;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.layout() == at::kStrided && tensor.numel() > 0) sorted.push_back(tensor);
  }
  const auto begin = [](const at::Tensor& tensor) { return tensor.const_data_ptr(); };
  std::sort(sorted.begin(), sorted.end(), [&](const at::Tensor& a, const at::Tensor& b) {
    return std::less<const void*>()(begin(a), begin(b));
  });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (overlap(sorted[i - 1], sorted[i])) return true;
  }
  return false;
}

}  // namespace dreamcomm

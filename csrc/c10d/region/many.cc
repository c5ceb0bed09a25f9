#include "c10d/region/many.h"

namespace dreamcomm {
std::vector<std::int64_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> found;
  found.reserve(tensors.size());
  for (const at::Tensor& one : tensors) found.push_back(one._version());
  return found;
}

std::vector<std::uintptr_t> storages_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::uintptr_t> found;
  found.reserve(tensors.size());
  for (const at::Tensor& one : tensors)
    found.push_back(reinterpret_cast<std::uintptr_t>(one.storage().unsafeGetStorageImpl()));
  return found;
}

std::vector<at::Tensor> placed_as(const std::vector<at::Tensor>& flat,
                                  const std::vector<at::Tensor>& likes) {
  TORCH_CHECK_VALUE(flat.size() == likes.size(), "expected as many tensors in both lists, got ",
                    flat.size(), " and ", likes.size());
  std::vector<at::Tensor> found;
  found.reserve(flat.size());
  for (std::size_t i = 0; i < flat.size(); ++i) {
    const at::Tensor& like = likes[i];
    found.push_back(flat[i].defined()
                        ? flat[i].as_strided(like.sizes(), like.strides(), flat[i].storage_offset())
                        : at::Tensor());
  }
  return found;
}

}  // namespace dreamcomm

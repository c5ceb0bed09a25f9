#include "c10d/units/lend.h"

#include <c10/core/StorageImpl.h>

#include <memory>
#include <utility>

namespace dreamcomm {
namespace {

void require_room(const at::Tensor& tensor, const at::Tensor& block, std::int64_t offset) {
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  TORCH_CHECK_VALUE(
      tensor.is_cpu() && tensor.is_non_overlapping_and_dense() && tensor.storage_offset() == 0,
      "lend: expected dense CPU tensors that begin their storage, got shape ", tensor.sizes(),
      " with strides ", tensor.strides());
  TORCH_CHECK_VALUE(offset >= 0 && bytes <= block.numel() - offset, "lend: expected ", bytes,
                    " bytes within the block's ", block.numel(), ", got them from ", offset, " on");
}

}  // namespace

void lend(const std::vector<at::Tensor>& tensors, const at::Tensor& block,
          const std::vector<std::int64_t>& offsets) {
  TORCH_CHECK_VALUE(block.is_cpu() && block.scalar_type() == at::kByte && block.is_contiguous(),
                    "lend: expected a block of bytes on the CPU");
  TORCH_CHECK_VALUE(tensors.size() == offsets.size(), "lend: expected an offset for each of ",
                    tensors.size(), " tensors, got ", offsets.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) require_room(tensors[i], block, offsets[i]);
  auto* const data = static_cast<std::byte*>(block.data_ptr());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    c10::StorageImpl* const storage = tensors[i].storage().unsafeGetStorageImpl();
    auto owner = std::make_unique<at::Tensor>(block);
    c10::DataPtr memory(
        data + offsets[i], owner.get(), [](void* held) { delete static_cast<at::Tensor*>(held); },
        c10::Device(c10::kCPU));
    static_cast<void>(owner.release());
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(tensors[i].nbytes());
  }
}

void take_back(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
    storage->set_nbytes(0);
  }
}

at::Tensor bytes_of(const at::Tensor& tensor, std::int64_t count) {
  const auto begin = tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
  const auto room = static_cast<std::int64_t>(tensor.storage().nbytes()) - begin;
  TORCH_CHECK_VALUE(tensor.is_cpu() && 0 <= count && count <= room, "expected ", count,
                    " bytes of a CPU tensor, got ", room);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU),
      caffe2::TypeMeta::Make<std::uint8_t>());
  made.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  made.unsafeGetTensorImpl()->set_storage_offset(begin);
  return made;
}

}  // namespace dreamcomm

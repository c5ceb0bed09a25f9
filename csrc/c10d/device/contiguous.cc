#include "c10d/device/contiguous.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>

#include "c10d/base/call_blocks.h"

namespace dreamcomm {
namespace {

bool lie_in_a_row(std::span<const Block> blocks) {
  const std::byte* end = nullptr;
  for (const Block& block : blocks) {
    if (block.bytes == 0) continue;
    if (end != nullptr && block.data != end) return false;
    end = block.data + block.bytes;
  }
  return true;
}

}  // namespace

at::Tensor tensor_at(const std::byte* data, std::size_t count, at::ScalarType type,
                     c10::Device device) {
  return at::for_blob(const_cast<std::byte*>(data), {static_cast<std::int64_t>(count)})
      .options(at::TensorOptions().dtype(type).device(device))
      .target_device(device)
      .make_tensor();
}

Contiguous::Contiguous(std::span<const Block> blocks, c10::Device device)
    : given_(blocks), device_(device), blocks_(blocks.begin(), blocks.end()) {
  if (lie_in_a_row(blocks)) return;
  std::int64_t bytes = 0;
  for (const Block& block : blocks) bytes += static_cast<std::int64_t>(block.bytes);
  memory_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  auto* at = static_cast<std::byte*>(memory_.mutable_data_ptr());
  for (Block& block : blocks_) {
    block.data = at;
    at += block.bytes;
  }
}

void Contiguous::copy_all(bool in) const {
  if (!memory_.defined()) return;
  for (std::size_t i = 0; i < given_.size(); ++i) {
    if (given_[i].bytes == 0) continue;
    const at::Tensor outside = bytes_at(given_[i], device_);
    const at::Tensor inside = bytes_at(blocks_[i], device_);
    copy_into(in ? inside : outside, in ? outside : inside);
  }
}

}  // namespace dreamcomm

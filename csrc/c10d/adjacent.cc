#include "c10d/adjacent.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>

#include "c10d/call.h"

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

/// The block's memory as a tensor of bytes.
at::Tensor view_of(const Block& block, const at::TensorOptions& bytes) {
  return at::for_blob(block.data, {static_cast<std::int64_t>(block.bytes)})
      .options(bytes)
      .target_device(bytes.device())
      .make_tensor();
}

}  // namespace

Adjacent::Adjacent(std::span<const Block> blocks, c10::Device device)
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

void Adjacent::copy_all(bool in) const {
  if (!memory_.defined()) return;
  const at::TensorOptions bytes = memory_.options();
  for (std::size_t i = 0; i < given_.size(); ++i) {
    if (given_[i].bytes == 0) continue;
    const at::Tensor outside = view_of(given_[i], bytes);
    const at::Tensor inside = view_of(blocks_[i], bytes);
    copy_into(in ? inside : outside, in ? outside : inside);
  }
}

}  // namespace dreamcomm

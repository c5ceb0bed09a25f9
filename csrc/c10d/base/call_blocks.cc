#include "c10d/base/call_blocks.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "c10d/process/process_heap.h"

namespace dreamcomm {
namespace {

/// The address of a plain tensor's memory; of a staged one's, an offset so far.
std::byte* address(const at::Tensor& tensor, bool plain, bool written) {
  if (!plain) return nullptr;
  return static_cast<std::byte*>(written ? tensor.mutable_data_ptr()
                                         : const_cast<void*>(tensor.const_data_ptr()));
}

std::byte* advance(std::byte* base, std::size_t bytes) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(base) + bytes);
}

template <typename Blocks>
void append(Blocks& blocks, std::byte* base, c10::ArrayRef<std::size_t> sizes) {
  for (const std::size_t bytes : sizes) {
    blocks.push_back({base, bytes});
    base = advance(base, bytes);
  }
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor blank_like(const at::Tensor& tensor) {
  const at::AutoDispatchBelowAutograd guard;
  return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
}

// Torch counts each write to a tensor, for autograd. An inference tensor has no count, so torch
// lets it be written only in inference mode; here a result is written there in either mode.
void copy_into(const at::Tensor& dst, const at::Tensor& src) {
  std::optional<c10::InferenceMode> uncounted;
  if (dst.is_inference() && !c10::InferenceMode::is_enabled()) uncounted.emplace();
  const at::AutoDispatchBelowAutograd guard;
  dst.copy_(src);
}

void Call::keep(const at::Tensor& tensor, bool plain, Range in, Range out) {
  if (plain) {
    plain_.push_back(tensor.storage());
  } else {
    staged_.push_back({tensor, at::Tensor(), in, out});
  }
}

void Call::input(const at::Tensor& tensor, c10::ArrayRef<std::size_t> sizes, bool aside) {
  const bool plain = !aside && is_plain(tensor);
  keep(tensor, plain, {in_.size(), sizes.size()}, {});
  append(in_, address(tensor, plain, false), sizes);
}

void Call::output(const at::Tensor& tensor, c10::ArrayRef<std::size_t> sizes, bool aside) {
  const bool plain = !aside && is_plain(tensor);
  keep(tensor, plain, {}, {out_.size(), sizes.size()});
  append(out_, address(tensor, plain, true), sizes);
}

void Call::input(const at::Tensor& tensor, bool aside) {
  input(tensor, std::array{static_cast<std::size_t>(tensor.nbytes())}, aside);
}

void Call::output(const at::Tensor& tensor, bool aside) {
  output(tensor, std::array{static_cast<std::size_t>(tensor.nbytes())}, aside);
}

void Call::in_place(const at::Tensor& tensor, bool aside) {
  const bool plain = !aside && is_plain(tensor);
  keep(tensor, plain, {in_.size(), 1}, {out_.size(), 1});
  const Block block{address(tensor, plain, true), static_cast<std::size_t>(tensor.nbytes())};
  in_.push_back(block);
  out_.push_back(block);
}

void Call::pass(std::shared_ptr<ShardedPass> pass, c10::ArrayRef<at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) plain_.push_back(tensor.storage());
  pass_ = std::move(pass);
}

void Call::stage() {
  for (Staged& part : staged_) {
    part.memory = blank_like(part.tensor);
    if (part.in.count > 0) copy_into(part.memory, part.tensor);
    std::byte* base = address(part.memory, true, true);
    for (std::size_t i = 0; i < part.in.count; ++i) {
      Block& block = in_[part.in.first + i];
      block.data = advance(base, reinterpret_cast<std::uintptr_t>(block.data));
    }
    for (std::size_t i = 0; i < part.out.count; ++i) {
      Block& block = out_[part.out.first + i];
      block.data = advance(base, reinterpret_cast<std::uintptr_t>(block.data));
    }
  }
}

void Call::unstage() {
  for (const Staged& part : staged_) {
    if (part.out.count > 0) copy_into(part.tensor, part.memory);
  }
}

void Call::leave_to_peers() const {
  const std::shared_ptr<Heap> heap = live_process_heap();
  if (!heap) return;
  for (const c10::Storage& storage : plain_) {
    heap->retire(static_cast<const std::byte*>(storage.data()));
  }
}

void Call::used_on(const c10::Stream& stream, const IsRegistered& is_registered) const {
  const c10::impl::VirtualGuardImpl device(stream.device_type());
  const auto use = [&](const c10::Storage& storage) {
    if (!is_registered(storage.data())) device.recordDataPtrOnStream(storage.data_ptr(), stream);
  };
  for (const c10::Storage& storage : plain_) use(storage);
  for (const Staged& part : staged_) use(part.tensor.storage());
}

bool Call::any_registered(const IsRegistered& is_registered) const {
  const auto is = [&](const c10::Storage& storage) { return is_registered(storage.data()); };
  return std::any_of(plain_.begin(), plain_.end(), is) ||
         std::any_of(staged_.begin(), staged_.end(),
                     [&](const Staged& part) { return is(part.tensor.storage()); });
}

Request Call::request(Clock::time_point deadline, std::size_t rest) const {
  return {.kind = kind_,
          .reduction = reduction_,
          .in = {in_.data(), in_.size()},
          .out = {out_.data(), out_.size()},
          .root = root_,
          .rest = static_cast<std::uint32_t>(rest),
          .deadline = deadline,
          .pass = pass_.get(),
          .digest = digest_,
          .refusal = refusal_.empty() ? nullptr : &refusal_};
}

}  // namespace dreamcomm

// Messages between two ranks: always asynchronous, the work waits for its completion.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"
#include "c10d/base/op_labels.h"

namespace dreamcomm {
namespace {

/// The tensor's const data pointer: a copy-on-write tensor stays lazy.
Block read_from(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr())), tensor.nbytes()};
}

/// The tensor's mutable data pointer: a copy-on-write tensor gets memory of its own.
Block written_to(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

/// Keeps the memory of the tensor's block for an engine that may outlast the call.
Cargo cargo_of(const at::Tensor& tensor, const Block& block) {
  return {std::shared_ptr<std::byte>(block.data, [tensor](std::byte*) {}), 0, block.bytes};
}

}  // namespace

bool DreamBackend::put_off(const Message& message) {
  if (!coalescing()) return false;
  const std::scoped_lock lock(coalescing_mutex_);
  if (!coalescing_) return false;
  coalescing_->messages.push_back(message);
  const c10::Device device = message.tensor.device();
  coalescing_->messages.back().stream =
      c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return true;
}

void DreamBackend::send_put_off() {
  std::vector<Message> messages;
  {
    const std::scoped_lock lock(coalescing_mutex_);
    if (coalescing_) messages.swap(coalescing_->messages);
  }
  std::map<int, c10::Device> peers;
  for (const Message& message : messages) peers.emplace(message.peer, message.tensor.device());
  for (const auto& [peer, device] : peers) {
    devices_->connects_with(peer, device);
  }
  for (const Message& message : messages) {
    const c10::StreamGuard on(*message.stream);
    message_on_device(message);
  }
}

WorkPtr DreamBackend::message_on_device(const Message& message) {
  const Tensor& tensor = message.tensor;
  if (!devices_->connects_with(message.peer, tensor.device())) {
    return forward_message(tensor, [&](c10d::Backend& inner) {
      TensorList tensors{tensor};
      return message.sends ? inner.send(tensors, message.peer, message.tag)
                           : inner.recv(tensors, message.peer, message.tag);
    });
  }
  const DevicePlan plan{.label = message.label,
                        .inputs = tensor,
                        .outputs = tensor,
                        .deadline = deadline_after(c10d::kUnsetTimeout, timeout()),
                        .async = true,
                        .sequence = static_cast<uint64_t>(sequence_.read())};
  return collect(message.sends ? devices_->send(plan, tensor, message.peer)
                               : devices_->receive(plan, tensor, message.peer));
}

WorkPtr DreamBackend::carry(const Message& message) {
  require_open();
  if (put_off(message)) return c10::make_intrusive<GroupWork>(std::vector<WorkPtr>());
  return message_on_device(message);
}

/// Postpones the error of a message in a batch to the batch's end; the messages behind it are not
/// begun. (An exception of torch's own, or Ctrl-C, escapes at once:
/// dreamcomm/_torch/coalescing.py.)
template <typename Act>
WorkPtr DreamBackend::part_of_batch(Act&& act) {
  if (!coalescing()) return act();
  try {
    if (!refused()) return act();
  } catch (const std::exception& error) {
    if (is_foreign(error)) throw;  // Ctrl-C
    const std::scoped_lock lock(coalescing_mutex_);
    if (!coalescing_) throw;
    coalescing_->refused = std::current_exception();
  }
  return c10::make_intrusive<GroupWork>(std::vector<WorkPtr>());
}

std::exception_ptr DreamBackend::refused() {
  const std::scoped_lock lock(coalescing_mutex_);
  return coalescing_ ? coalescing_->refused : nullptr;
}

WorkPtr DreamBackend::send(TensorList& tensors, int dst, int tag) {
  return part_of_batch([&] { return send_one(only(at(kSend), "tensors", tensors), dst, tag); });
}

WorkPtr DreamBackend::recv(TensorList& tensors, int src, int tag) {
  return part_of_batch([&] { return receive_one(only(at(kRecv), "tensors", tensors), src, tag); });
}

WorkPtr DreamBackend::send_one(const Tensor& tensor, int dst, int tag) {
  const Site site = at(kSend);
  if (devices_->handles(tensor)) {
    require_peer(site, "dst", dst);
    require_tag(site, tag);
    require_dense(site, "tensor", tensor);
    return carry({kSend, tensor, dst, tag, true});
  }
  const auto by_torch = [&] {
    TensorList tensors{tensor};
    return forward_message(tensor,
                           [&](c10d::Backend& inner) { return inner.send(tensors, dst, tag); });
  };
  if (!shares(tensor)) return by_torch();
  require_open();
  require_dense(site, "tensor", tensor);
  require_peer(site, "dst", dst);
  const std::uint64_t number = require_tag(site, tag);
  Tensor memory = tensor;
  if (!is_plain(tensor)) {
    memory = blank_like(tensor);
    copy_into(memory, tensor);
  }
  const Block block = read_from(memory);
  auto work = c10::make_intrusive<MessageWork>(rank_, kSend, tensor, callback_threads_, cpu_);
  const ProfiledWork::Record shown = work->take_record();
  try {
    const Clock::time_point deadline = deadline_after(c10d::kUnsetTimeout, timeout());
    work->follow(cpu_->send(cargo_of(memory, block), dst, number, deadline), [memory] {});
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
  return collect(work);
}

WorkPtr DreamBackend::receive_one(const Tensor& tensor, int src, int tag) {
  const Site site = at(kRecv);
  if (devices_->handles(tensor)) {
    require_peer(site, "src", src);
    require_tag(site, tag);
    require_writable(site, "tensor", tensor);
    return carry({kRecv, tensor, src, tag, false});
  }
  const auto by_torch = [&] {
    TensorList tensors{tensor};
    return forward_message(tensor,
                           [&](c10d::Backend& inner) { return inner.recv(tensors, src, tag); });
  };
  if (!shares(tensor)) return by_torch();
  return receive(kRecv, tensor, require_peer(site, "src", src), tag);
}

WorkPtr DreamBackend::recvAnysource(TensorList& tensors, int tag) {
  return part_of_batch([&] {
    const Tensor& tensor = only(at(kRecvAnySource), "tensors", tensors);
    if (shares(tensor)) return receive(kRecvAnySource, tensor, std::nullopt, tag);
    return forward_message(tensor,
                           [&](c10d::Backend& inner) { return inner.recvAnysource(tensors, tag); });
  });
}

WorkPtr DreamBackend::receive(const OpLabel& label, const Tensor& tensor, std::optional<int> source,
                              int tag) {
  const Site site = at(label);
  require_open();
  require_writable(site, "tensor", tensor);
  const std::uint64_t number = require_tag(site, tag);
  const bool plain = is_plain(tensor);
  const Tensor memory = plain ? tensor : blank_like(tensor);
  const Block block = written_to(memory);
  auto work = c10::make_intrusive<MessageWork>(rank_, label, tensor, callback_threads_, cpu_);
  const ProfiledWork::Record shown = work->take_record();
  try {
    const Clock::time_point deadline = deadline_after(c10d::kUnsetTimeout, timeout());
    auto completion = cpu_->receive(cargo_of(memory, block), source, number, deadline);
    work->follow(std::move(completion), [plain, tensor, memory] {
      if (!plain) copy_into(tensor, memory);
    });
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
  return collect(work);
}

}  // namespace dreamcomm

// Messages between two ranks: always asynchronous, the work waits for its ticket.
#include "c10d/backend.h"
#include "c10d/convert.h"
#include "c10d/labels.h"

namespace dreamcomm {
namespace {

std::uint64_t require_tag(const Site& site, int tag) {
  TORCH_CHECK_VALUE(tag >= 0, site, "Tag must be nonnegative, got ", tag);
  return static_cast<std::uint64_t>(tag);
}

int require_peer(const Site& site, const char* argument, int peer) {
  require_rank(site, argument, peer);
  TORCH_CHECK_VALUE(peer != site.rank, site, "expected '", argument,
                    "' to be another rank, got this one");
  return peer;
}

Block block_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr())), tensor.nbytes()};
}

}  // namespace

WorkPtr DreamBackend::send(TensorList& tensors, int dst, int tag) {
  const Site site = at(kSend);
  const Tensor& tensor = only(site, "tensors", tensors);
  if (!shares(tensor)) {
    return forward(tensor, [&](c10d::Backend& inner) { return inner.send(tensors, dst, tag); });
  }
  require_open();
  require_dense(site, "tensor", tensor);
  require_peer(site, "dst", dst);
  const std::uint64_t number = require_tag(site, tag);
  Tensor memory = tensor;
  if (!is_plain(tensor)) {
    memory = blank_like(tensor);
    copy_into(memory, tensor);
  }
  auto work = c10::make_intrusive<MessageWork>(rank_, kSend, tensor, executor_, comm_);
  try {
    auto ticket =
        comm_->send(block_of(memory), dst, number, deadline_after(c10d::kUnsetTimeout, timeout()));
    work->follow(std::move(ticket), [memory] {});
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
  return collect(work);
}

WorkPtr DreamBackend::recv(TensorList& tensors, int src, int tag) {
  const Tensor& tensor = only(at(kRecv), "tensors", tensors);
  if (!shares(tensor)) {
    return forward(tensor, [&](c10d::Backend& inner) { return inner.recv(tensors, src, tag); });
  }
  return receive(kRecv, tensor, require_peer(at(kRecv), "src", src), tag);
}

WorkPtr DreamBackend::recvAnysource(TensorList& tensors, int tag) {
  const Tensor& tensor = only(at(kRecvAnySource), "tensors", tensors);
  if (!shares(tensor)) {
    return forward(tensor, [&](c10d::Backend& inner) { return inner.recvAnysource(tensors, tag); });
  }
  return receive(kRecvAnySource, tensor, std::nullopt, tag);
}

WorkPtr DreamBackend::receive(const Label& label, const Tensor& tensor, std::optional<int> source,
                              int tag) {
  const Site site = at(label);
  require_open();
  require_writable(site, "tensor", tensor);
  const std::uint64_t number = require_tag(site, tag);
  const bool plain = is_plain(tensor);
  const Tensor memory = plain ? tensor : blank_like(tensor);
  auto work = c10::make_intrusive<MessageWork>(rank_, label, tensor, executor_, comm_);
  try {
    auto ticket = comm_->receive(block_of(memory), source, number,
                                 deadline_after(c10d::kUnsetTimeout, timeout()));
    work->follow(std::move(ticket), [plain, tensor, memory] {
      if (!plain) copy_into(tensor, memory);
    });
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
  return collect(work);
}

}  // namespace dreamcomm

// Messages without a work, and tensors of messages that lie in their sender's heap.
#include "c10d/backend/backend.h"
#include "c10d/base/check_args.h"
#include "c10d/base/convert.h"
#include "c10d/base/op_labels.h"
#include "c10d/messages/placed_message.h"
#include "c10d/process/process_heap.h"

namespace dreamcomm {

std::shared_ptr<Completion> DreamBackend::send_cargo(const Cargo& cargo, int dst, int tag) {
  const Site site = at(kSend);
  require_open();
  require_peer(site, "dst", dst);
  try {
    const Clock::time_point deadline = deadline_after(c10d::kUnsetTimeout, timeout());
    return cpu_->send(cargo, dst, require_tag(site, tag), deadline);
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
}

std::shared_ptr<Completion> DreamBackend::receive_cargo(const Cargo& cargo, int tag) {
  const Site site = at(kRecvAnySource);
  require_open();
  try {
    const Clock::time_point deadline = deadline_after(c10d::kUnsetTimeout, timeout());
    return cpu_->receive(cargo, std::nullopt, require_tag(site, tag), deadline);
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
}

void DreamBackend::wait_for(Completion& completion, const Interrupt& pause) {
  try {
    cpu_->wait(completion, pause);
  } catch (const Error& error) {
    // A message that failed holds its error.
    if (!completion.done()) std::rethrow_exception(to_torch(error));
  }
}

std::unique_ptr<PlacedMessage> DreamBackend::place(const Tensor& tensor) const {
  const Site site = at(kSend);
  require_dense(site, "tensor", tensor);
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.is_contiguous(), site,
                    "expected a contiguous tensor of the CPU");
  if (!shares_heaps()) return nullptr;
  const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
  return PlacedMessage::copy_of({data, tensor.nbytes()}, heap_);
}

at::Tensor DreamBackend::take_placed(int source, std::int64_t offset, at::IntArrayRef shape,
                                     at::ScalarType dtype) const {
  const Site site = at(kRecv);
  require_open();
  require_rank(site, "source", source);
  TORCH_CHECK_VALUE(shares_heaps(), site, "the ranks do not map each other's heaps");
  const Tensor into =
      allocate_tensor(*heap_, c10::multiply_integers(shape), at::TensorOptions().dtype(dtype))
          .view(shape);
  const std::span<std::byte> heap = single_host("placed messages lie in memory").heap(source);
  const auto begin = static_cast<std::size_t>(offset);
  TORCH_CHECK_VALUE(offset >= 0 && begin <= heap.size() &&
                        PlacedMessage::space_for(into.nbytes()) <= heap.size() - begin,
                    site, "no message of ", into.nbytes(), " bytes can lie at ", offset,
                    " of the heap of rank ", source);
  PlacedMessage::take(heap.data() + begin, into.nbytes(), into.mutable_data_ptr());
  return into;
}

}  // namespace dreamcomm

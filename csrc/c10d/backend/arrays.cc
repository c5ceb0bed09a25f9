// Collectives on memory of other libraries' arrays, without a tensor.
#include <utility>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/op_labels.h"

namespace dreamcomm {

void DreamBackend::run_blocks(const OpLabel& label, Request request) {
  require_open();
  require_turn(label);
  sequence_.add(1);
  request.deadline = deadline_after(c10d::kUnsetTimeout, timeout());
  try {
    cpu_->run(request, interrupt_);
  } catch (...) {
    std::rethrow_exception(current_as_torch());
  }
}

c10::intrusive_ptr<DreamWork> DreamBackend::start_blocks(const OpLabel& label, Request request,
                                                         std::vector<Block> in,
                                                         std::vector<Block> out) {
  require_open();
  require_turn(label);
  sequence_.add(1);
  auto work =
      c10::make_intrusive<DreamWork>(rank_, label, Tensors{}, Tensors{}, callback_threads_, cpu_);
  work->set_sequence(static_cast<uint64_t>(sequence_.read()));
  outstanding_->begin();
  cpu_->submit([work, request, in = std::move(in), out = std::move(out), patience = timeout(),
                group = cpu_.get(), pending = outstanding_]() mutable {
    std::exception_ptr error;
    request.in = in;
    request.out = out;
    request.deadline = deadline_after(patience, patience);
    try {
      group->run_ordered(request, {});
    } catch (...) {
      error = current_as_torch();
    }
    std::exchange(work, nullptr)->complete(std::move(error));
    pending->end();
  });
  return work;
}

}  // namespace dreamcomm

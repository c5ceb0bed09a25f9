// Collectives on memory of other libraries' arrays, without a tensor.
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

}  // namespace dreamcomm

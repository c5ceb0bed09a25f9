#include "c10d/profiled.h"

#include <vector>

#include "core/error.h"

namespace dreamcomm {

void Profiled::show_call(const Label& label, Tensors inputs) {
  record_.emplace(at::RecordScope::USER_SCOPE);
  if (!record_->isActive()) return;
  record_->_setAsync();  // as every backend's: a call may outlast what is shown of it
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  title_ = label.title;
  record_->before(std::string_view(title_), &values);
}

void Profiled::show_wait(const Label& label) {
  record_.emplace(at::RecordScope::USER_SCOPE);
  if (!record_->isActive()) return;
  title_ = concat("dreamcomm:wait(", label.name(), ")");
  record_->before(std::string_view(title_));
}

}  // namespace dreamcomm

#include "c10d/base/profiled_work.h"

#include <string_view>

#include "core/error.h"

namespace dreamcomm {

void ProfiledWait::show(const char* name) {
  record_.emplace(at::RecordScope::USER_SCOPE);
  if (!record_->isActive()) return;
  title_ = concat("dreamcomm:wait(", name, ")");
  record_->before(std::string_view(title_));
}

}  // namespace dreamcomm

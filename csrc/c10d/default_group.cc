#include "c10d/default_group.h"

#include "c10d/process_wide.h"

namespace dreamcomm {
namespace {

ProcessWide<Communicator>& current() {
  static ProcessWide<Communicator> only;
  return only;
}

}  // namespace

void set_default_group(const std::shared_ptr<Communicator>& group) { current().set(group); }

std::shared_ptr<Communicator> default_group() { return current().get(); }

}  // namespace dreamcomm

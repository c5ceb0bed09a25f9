#include "c10d/default_group.h"

#include <mutex>

#include "c10d/fork_mark.h"

namespace dreamcomm {
namespace {

/// As torch has one: groups made later are given their members' ranks in it.
struct Current {
  std::mutex mutex;
  std::weak_ptr<Communicator> group;
  std::unique_ptr<ForkMark> maker;
};

Current& current() {
  static Current only;
  return only;
}

}  // namespace

void set_default_group(const std::shared_ptr<Communicator>& group) {
  Current& now = current();
  const std::scoped_lock lock(now.mutex);
  now.group = group;
  now.maker = std::make_unique<ForkMark>();
}

std::shared_ptr<Communicator> default_group() {
  Current& now = current();
  const std::scoped_lock lock(now.mutex);
  return now.maker && now.maker->at_home() ? now.group.lock() : nullptr;
}

}  // namespace dreamcomm

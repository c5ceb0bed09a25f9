#include "c10d/process_whereabouts.h"

#include <mutex>

#include "c10d/fork_mark.h"

namespace dreamcomm {
namespace {

/// Shared by all groups, as there is one main thread to tell of.
struct Current {
  std::mutex mutex;
  std::weak_ptr<Whereabouts> whereabouts;
  std::unique_ptr<ForkMark> maker;
  bool ended = false;

  /// Under the lock.
  std::shared_ptr<Whereabouts> live() const {
    return maker && maker->at_home() ? whereabouts.lock() : nullptr;
  }
};

Current& current() {
  static Current only;
  return only;
}

}  // namespace

std::shared_ptr<Whereabouts> process_whereabouts(const Whereabouts::Tell& tell) {
  Current& now = current();
  const std::scoped_lock lock(now.mutex);
  if (now.ended) return nullptr;
  std::shared_ptr<Whereabouts> one = now.live();
  if (one) return one;
  one = Whereabouts::make(tell);
  now.whereabouts = one;
  now.maker = std::make_unique<ForkMark>();
  return one;
}

std::shared_ptr<Whereabouts> live_process_whereabouts() {
  Current& now = current();
  const std::scoped_lock lock(now.mutex);
  return now.live();
}

void end_process_whereabouts() {
  Current& now = current();
  std::shared_ptr<Whereabouts> one;
  {
    const std::scoped_lock lock(now.mutex);
    now.ended = true;
    one = now.live();
  }
  if (one) one->stop();
}

}  // namespace dreamcomm

#include "c10d/process_whereabouts.h"

#include <atomic>

#include "c10d/process_wide.h"

namespace dreamcomm {
namespace {

/// Shared by all groups, as there is one main thread to tell of.
struct Current {
  ProcessWide<Whereabouts> whereabouts;
  std::atomic<bool> ended = false;
};

Current& current() {
  static Current only;
  return only;
}

}  // namespace

std::shared_ptr<Whereabouts> process_whereabouts(const Whereabouts::Tell& tell) {
  return current().whereabouts.get_or([&]() -> std::shared_ptr<Whereabouts> {
    return current().ended ? nullptr : Whereabouts::make(tell);
  });
}

std::shared_ptr<Whereabouts> live_process_whereabouts() { return current().whereabouts.get(); }

void end_process_whereabouts() {
  current().ended = true;
  if (const std::shared_ptr<Whereabouts> one = live_process_whereabouts()) one->stop();
}

}  // namespace dreamcomm

#include "c10d/process/process_call_sites.h"

#include <atomic>

#include "c10d/process/process_singleton.h"

namespace dreamcomm {
namespace {

/// Shared by all groups, as there is one main thread to tell of.
struct Current {
  ProcessWide<Whereabouts> whereabouts;
  std::atomic<bool> ended = false;
};

Current& of_process() {
  static Current only;
  return only;
}

}  // namespace

std::shared_ptr<Whereabouts> process_whereabouts(const Whereabouts::Tell& tell) {
  return of_process().whereabouts.get_or([&]() -> std::shared_ptr<Whereabouts> {
    return of_process().ended ? nullptr : Whereabouts::make(tell);
  });
}

std::shared_ptr<Whereabouts> live_process_whereabouts() { return of_process().whereabouts.get(); }

void end_process_whereabouts() {
  of_process().ended = true;
  if (const std::shared_ptr<Whereabouts> one = live_process_whereabouts()) one->stop();
}

}  // namespace dreamcomm

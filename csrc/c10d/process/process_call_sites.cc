#include "c10d/process/process_call_sites.h"

#include <atomic>

#include "c10d/process/process_singleton.h"

namespace dreamcomm {
namespace {

/// Shared by all groups: a process has one main thread.
struct Current {
  ProcessSingleton<CallSiteService> service;
  std::atomic<bool> ended = false;
};

Current& of_process() {
  static Current only;
  return only;
}

}  // namespace

std::shared_ptr<CallSiteService> process_call_sites(const CallSiteService::Tell& tell) {
  return of_process().service.get_or([&]() -> std::shared_ptr<CallSiteService> {
    return of_process().ended ? nullptr : CallSiteService::make(tell);
  });
}

std::shared_ptr<CallSiteService> live_process_call_sites() { return of_process().service.get(); }

void end_process_call_sites() {
  of_process().ended = true;
  if (const std::shared_ptr<CallSiteService> one = live_process_call_sites()) one->stop();
}

}  // namespace dreamcomm

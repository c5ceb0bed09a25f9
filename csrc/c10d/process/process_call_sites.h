// The one CallSiteService of all groups of the process (transport/introspect/call_site_query.h).
#pragma once

#include <memory>

#include "transport/introspect/call_site_query.h"

namespace dreamcomm {

/// The one there is, or a new one. Null once the process is about to exit. Throws Error(kSystem).
std::shared_ptr<CallSiteService> process_call_sites(const CallSiteService::Tell& tell);
/// The one there is, or null; in a forked child that has made none, too.
std::shared_ptr<CallSiteService> live_process_call_sites();
/// Stops it for good: the interpreter is about to end. Without the GIL.
void end_process_call_sites();

}  // namespace dreamcomm

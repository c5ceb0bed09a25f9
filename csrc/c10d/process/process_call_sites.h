// The one Whereabouts of all groups of the process (transport/introspect/call_site_query.h).
#pragma once

#include <memory>

#include "transport/introspect/call_site_query.h"

namespace dreamcomm {

/// The one there is, or a new one. Null once the process is about to exit. Throws Error(kSystem).
std::shared_ptr<Whereabouts> process_whereabouts(const Whereabouts::Tell& tell);
/// The one there is, or null; in a forked child that has made none, too.
std::shared_ptr<Whereabouts> live_process_whereabouts();
/// Stops it for good: the interpreter is about to go. Without the GIL.
void end_process_whereabouts();

}  // namespace dreamcomm

// How many processors this process may use.
#pragma once

namespace dreamcomm {

/// Those of its affinity mask; at least 1.
int usable_cpus();

}  // namespace dreamcomm

// Identifies a process among those of all containers of a host, also when its number is reused.
#pragma once

#include "gpu/host/driver.h"

namespace dreamcomm::gpu {

/// Equal for all threads of a process, and different in a forked child.
Id process_id();

}  // namespace dreamcomm::gpu

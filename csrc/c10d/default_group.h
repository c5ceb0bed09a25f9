// The process's default group: torch tells the members of other groups by their ranks in it.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace dreamcomm {

/// From now on, as long as it lives.
void set_default_group(const std::shared_ptr<Communicator>& group);
/// The one that was set last, if it lives and this process set it, or null.
std::shared_ptr<Communicator> default_group();

}  // namespace dreamcomm

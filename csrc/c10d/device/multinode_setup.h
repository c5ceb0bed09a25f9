// How the ranks of several nodes agree whether calls on their devices run hierarchically.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "c10d/base/torch_fallback.h"
#include "c10d/device/multinode_group.h"
#include "gpu/host/communicator.h"

namespace dreamcomm {

/// The parts of a group on several nodes beyond the group of this host's ranks.
struct DeviceNodes {
  DevicePlace place;
  /// Collective among the ranks of all nodes.
  gpu::Exchange exchange;
  /// Makes an engine for this group alone, which carries only parts of calls between nodes.
  std::function<Fallback::Inner()> make_engine;
};

/// The outcome, the same on all ranks.
struct MultinodeSetup {
  std::unique_ptr<MultinodeDeviceGroup> group;  // or null
  std::string why_not;                          // if null: which rank cannot, and why
};

/// Collective among the ranks of all nodes. `group` is that of this host's ranks, or null, and then
/// `why_not` says why. Throws what `exchange` throws.
MultinodeSetup set_up_nodes(const std::shared_ptr<gpu::Communicator>& group,
                            const std::string& why_not, const DeviceNodes& nodes,
                            c10::Device device);

}  // namespace dreamcomm

// How the ranks of several hosts find out whether calls on their devices go hierarchically.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "c10d/base/torch_fallback.h"
#include "c10d/device/multinode_group.h"
#include "gpu/host/communicator.h"

namespace dreamcomm {

/// What a group that spans hosts has beyond that of this host's ranks.
struct DeviceHosts {
  DevicePlace place;
  /// Collective among all hosts' ranks.
  gpu::Exchange exchange;
  /// Of a group of its own, which carries nothing but parts of calls between hosts.
  std::function<Fallback::Inner()> make_engine;
};

/// What became of it; the same on all ranks.
struct MultinodeSetup {
  std::unique_ptr<MultinodeDeviceGroup> span;  // or null, and then
  std::string why_not;                         // which rank cannot, and why
};

/// Collective among all hosts' ranks. `group` is of the ranks of this one's, or null, and then
/// `why_not` says why. Throws what `exchange` throws.
MultinodeSetup meet_hosts(const std::shared_ptr<gpu::Communicator>& group,
                          const std::string& why_not, const DeviceHosts& hosts, c10::Device device);

}  // namespace dreamcomm

// Calls on devices in a group whose ranks are on several nodes.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/base/device_kind.h"
#include "c10d/base/torch_fallback.h"
#include "core/flag.h"
#include "gpu/host/communicator.h"
#include "internode/collectives/hier_context.h"

namespace dreamcomm {

/// Where a rank of such a group is.
struct DevicePlace {
  Topology topology;
  int rank = 0;
  bool widens_halves = true;  // as HierarchicalOptions
  std::size_t chunk = kDeviceChunkBytes;
};

/// Sums are made in the order of HierarchicalCommunicator, so equal placements give the bits of the
/// host's tensors. INVARIANT: once a call's stream has reached the call's end, all ranks know if it
/// failed on one: agree() puts the ranks' verdicts behind it. So no host uses sums that another one
/// could not make.
class MultinodeDeviceGroup {
 public:
  MultinodeDeviceGroup(std::shared_ptr<gpu::Communicator> group, DevicePlace place,
                       Fallback::Inner engine, c10::Device device);

  /// On the current stream, which is `stream`. Throws Error.
  void run(const Request& request, void* stream);
  void agree(void* stream);
  /// True if a call has begun that is not agreed on: other nodes wait for this rank.
  bool under_way() const { return under_way_; }

  const DevicePlace& place() const { return place_; }
  const Fallback::Inner& engine() const { return engine_; }
  /// Bytes of this rank between nodes, without verdicts. Any thread.
  std::array<WireTraffic, kKinds> traffic() const;

 private:
  const std::shared_ptr<gpu::Communicator> group_;
  const DevicePlace place_;
  const Fallback::Inner engine_;
  const c10::Device device_;
  bool under_way_ = false;
  std::array<Gauge, kKinds> sent_;
  std::array<Gauge, kKinds> received_;
};

}  // namespace dreamcomm

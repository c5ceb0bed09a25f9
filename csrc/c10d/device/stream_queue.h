// The calls of one group of GPU kernels, one after the other, on streams of torch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c10d/base/call_blocks.h"
#include "c10d/device/device_communicator.h"
#include "c10d/device/device_work.h"
#include "c10d/device/multinode_group.h"
#include "comm/communicator.h"
#include "gpu/host/communicator.h"

namespace dreamcomm {

/// Order. A call runs on the caller's current stream, or, if it is asynchronous, on a
/// stream of the queue's that waits for the caller's. The driver orders the kernels of a
/// group, whatever their streams. So work that the caller puts on its stream after wait()
/// finds the results, and the host waits for nothing. Thread-safe.
class StreamQueue {
 public:
  /// Functions of the queue's owner.
  struct Ways {
    std::function<bool(const c10::Stream&)> is_capturing;
    Call::IsRegistered is_registered;
    std::function<c10::Stream()> make_stream;
  };
  /// `about` opens the text of errors, `peer_reports` adds what is known of ranks; `multinode`:
  /// null for a group of one host.
  StreamQueue(std::shared_ptr<gpu::Communicator> group, c10::Device device, Ways ways,
              std::string about, gpu::PeerReports peer_reports,
              std::unique_ptr<MultinodeDeviceGroup> multinode = nullptr);

  /// Puts the calls, parts of one, on their stream. Throws what torch expects.
  c10::intrusive_ptr<DeviceWork> issue(int rank, const DevicePlan& plan, Calls& calls);

  const std::shared_ptr<gpu::Communicator>& group() const { return group_; }
  /// Why a call failed, or nothing.
  std::optional<Error> failure() const { return group_->failure(); }
  void abort();
  /// Null: all ranks are on one host.
  const MultinodeDeviceGroup* multinode() const { return multinode_.get(); }
  /// Collective: waits for this rank's kernels and releases the group's memory. Throws what
  /// `exchange` or `pause` throws; then the memory is kept.
  void close(const gpu::Exchange& exchange, const Interrupt& pause);
  /// Waits for this rank's kernels, and ends them if they take long.
  void leave(const Interrupt& pause);

 private:
  /// Asynchronous calls on registered memory, until they are done.
  struct Kept {
    std::shared_ptr<const c10::Event> done;
    Calls calls;
  };

  c10::Stream stream_for(const DevicePlan& plan);
  void run_part(const Request& request, void* native);
  void run_parts(const DevicePlan& plan, Calls& calls, const c10::Stream& stream);
  bool ends_within(std::chrono::milliseconds longest, const Interrupt& pause) const;

  const std::shared_ptr<gpu::Communicator> group_;
  const c10::Device device_;
  const Ways ways_;
  const std::unique_ptr<MultinodeDeviceGroup> multinode_;
  std::mutex calling_;  // one call at a time; guards what follows
  std::optional<c10::Stream> side_;
  std::shared_ptr<const c10::Event> last_;  // behind the last call
  std::vector<Kept> kept_;
};

}  // namespace dreamcomm

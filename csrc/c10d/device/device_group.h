// Calls on an accelerator's tensors, carried out by this library's own kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c10d/base/device_kind.h"
#include "c10d/device/bootstrap_exchange.h"
#include "c10d/device/device_heap.h"
#include "c10d/device/multinode_setup.h"
#include "c10d/device/stream_queue.h"
#include "c10d/device/watchdog.h"
#include "comm/communicator.h"
#include "gpu/cuda/driver.h"
#include "gpu/host/communicator.h"

namespace dreamcomm {

/// The part of a backend that serves one device of this rank: that of the first tensor.
/// For the first collective all ranks meet (gpu/host/communicator.h), for the first message between
/// two these two; until then no device is touched. Thread-safe.
class DeviceGroup {
 public:
  DeviceGroup(std::shared_ptr<Communicator> comm, DeviceKind kind, Interrupt interrupt,
              LongestWait rendezvous_timeout, std::optional<DeviceHosts> hosts);

  /// Whether kernels carry out this reduction, or for none a movement, of such tensors.
  /// Collective at the first tensor that they would serve. Throws c10::ValueError for a
  /// second device, and what befalls the meeting.
  bool serves(const at::Tensor& tensor, const std::optional<Reduction>& reduction);
  /// The same for a barrier on a device.
  bool serves(c10::Device device);
  c10::DeviceType type() const { return kind_.type; }
  /// After serves().
  c10::intrusive_ptr<DeviceWork> issue(const DevicePlan& plan, Calls& calls);

  /// Whether messages of such tensors may be carried; if so, meets_with() says whether they
  /// are; `peer` of this host, as comm numbers it. Of both ranks, at the first message between
  /// them: they meet then, and wait for each other. Where several pairs meet, all ranks must take
  /// them in the order of ranks.
  bool may_carry(const at::Tensor& tensor) const;
  bool meets_with(int peer, c10::Device device);
  /// After meets_with(). Messages to a rank arrive in the order they were sent, whatever
  /// their tags. Always asynchronous.
  c10::intrusive_ptr<DeviceWork> send(const DevicePlan& plan, const at::Tensor& tensor, int to);
  c10::intrusive_ptr<DeviceWork> receive(const DevicePlan& plan, const at::Tensor& tensor,
                                         int from);

  /// A tensor of one dimension in registered memory, or, where there is none left, the
  /// system's. Collective at first, as serves().
  at::Tensor allocate(std::int64_t size, const at::TensorOptions& options);
  bool allocates() const { return kind_.options.heap_bytes > 0; }
  /// Whether the tensor lies in registered memory.
  bool holds(const at::Tensor& tensor) const;

  /// Why a call failed, or nothing.
  std::optional<Error> failure() const;
  void abort();
  /// Waits for this rank's kernels. `together`: and releases the groups' memory, if the
  /// ranks can agree on it; else ends them if they take long.
  void close(bool together);
  /// Bytes of this rank between hosts, in calls on devices.
  std::array<WireTraffic, kKinds> traffic() const;
  /// What carries calls between hosts, or null.
  Fallback::Inner engine() const;
  /// For people.
  std::string describe() const;
  /// How a call would go, if ranks have met.
  std::string explain(Kind kind, std::size_t bytes) const;

 private:
  using QueuePtr = std::shared_ptr<StreamQueue>;
  /// Messages with one peer, each way its own: neither waits for the other.
  struct Pair {
    QueuePtr to;
    QueuePtr from;
    std::string broken{};  // why their meeting was cut off, if it was
  };

  std::optional<Pair> pair_with(int peer) const;
  void settle_on(c10::Device device);
  void require_no_capture() const;
  bool is_registered(const void* address) const;
  c10::Stream make_stream();
  StreamQueue::Ways ways();
  bool meet();
  std::unique_ptr<MultinodeDeviceGroup> meet_hosts(std::shared_ptr<gpu::Communicator>& group,
                                                   std::string& why_not);
  /// A rank of `comm`, as people know it.
  int number(int rank) const;
  std::string about_host() const;
  /// What errors of a group of these ranks of `comm` know of them.
  gpu::PeerReports peer_reports(std::vector<int> ranks) const;
  void watch();
  bool meet_pair(int peer);
  QueuePtr meet_one_way(int from, int to);
  std::vector<QueuePtr> queues() const;
  void close_queues(bool together);
  void close_together();
  void leave_all();
  void pause() const;

  const std::shared_ptr<Communicator> comm_;
  const DeviceKind kind_;
  const Interrupt interrupt_;
  const LongestWait rendezvous_timeout_;
  const std::optional<DeviceHosts> hosts_;

  std::mutex meeting_;  // held while all ranks meet
  std::mutex meeting_in_pairs_;
  mutable std::mutex mutex_;  // never held for long; of these:
  std::optional<c10::Device> device_;
  bool met_ = false;
  QueuePtr all_;                      // null: they have not met, or cannot
  std::map<int, Pair> pairs_;         // by peer; of null lanes: they cannot
  std::vector<c10::Stream> streams_;  // of the lanes
  std::shared_ptr<DeviceHeap> heap_;  // null: none
  std::string why_not_ = "no tensor on such a device has come yet";
  std::unique_ptr<DeviceWatchdog> watchdog_;  // once ranks have met; ends before all else
};

}  // namespace dreamcomm

// Runs calls on an accelerator's tensors by this library's own kernels.
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
#include "c10d/device/device_communicator.h"
#include "c10d/device/device_heap.h"
#include "c10d/device/multinode_setup.h"
#include "c10d/device/stream_queue.h"
#include "c10d/device/watchdog.h"
#include "comm/communicator.h"
#include "gpu/cuda/driver.h"
#include "gpu/host/communicator.h"

namespace dreamcomm {

/// Serves one device of this rank: that of the first tensor. All ranks bootstrap at the first
/// collective (gpu/host/bootstrap.h), two ranks at the first message between them; until then no
/// device is touched.
class DeviceGroup final : public DeviceCommunicator {
 public:
  /// `host` is the communicator of this host's ranks; `nodes`: in a group on several nodes.
  DeviceGroup(std::shared_ptr<Communicator> host, DeviceKind kind, Interrupt interrupt,
              LongestWait rendezvous_timeout, std::optional<DeviceNodes> nodes);

  using DeviceCommunicator::handles;

  c10::DeviceType type() const override { return kind_.type; }
  bool handles(c10::Device device) const override { return device.type() == kind_.type; }
  bool serves(const at::Tensor& tensor, const std::optional<Reduction>& reduction) override;
  bool serves(c10::Device device) override;
  c10::intrusive_ptr<DeviceWork> issue(const DevicePlan& plan, Calls& calls) override;

  bool connects_with(int peer, c10::Device device) override;
  c10::intrusive_ptr<DeviceWork> send(const DevicePlan& plan, const at::Tensor& tensor,
                                      int to) override;
  c10::intrusive_ptr<DeviceWork> receive(const DevicePlan& plan, const at::Tensor& tensor,
                                         int from) override;

  at::Tensor allocate(std::int64_t size, const at::TensorOptions& options) override;
  bool allocates() const override { return kind_.options.heap_bytes > 0; }
  bool holds(const at::Tensor& tensor) const override;

  std::optional<Error> failure() const override;
  void abort() override;
  void close(bool together) override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  std::array<WireTraffic, kKinds> traffic() const override;
  std::string explain(Kind kind, std::size_t bytes) const override;

 private:
  using QueuePtr = std::shared_ptr<StreamQueue>;
  /// Messages with one peer. Each way has its own queue: neither waits for the other.
  struct Pair {
    QueuePtr to;
    QueuePtr from;
    std::string broken{};  // why their bootstrap failed, if it did
  };

  /// Ranks below are those of `host_`, unless they come from the interface.
  std::optional<Pair> pair_with(int peer) const;
  /// A rank of the group by its index on this host; nothing for other nodes' ranks.
  std::optional<int> index_of(int rank) const;
  void settle_on(c10::Device device);
  void require_no_capture() const;
  bool is_registered(const void* address) const;
  c10::Stream make_stream();
  StreamQueue::Ways ways();
  bool bootstrap();
  std::unique_ptr<MultinodeDeviceGroup> bootstrap_nodes(std::shared_ptr<gpu::Communicator>& group,
                                                        std::string& why_not);
  /// The group's rank that has this index on this host.
  int number(int index) const;
  std::string about_host() const;
  /// The reports that errors of a GPU group of these ranks add.
  gpu::PeerReports peer_reports(std::vector<int> ranks) const;
  void watch();
  bool bootstrap_pair(int peer);
  QueuePtr bootstrap_one_way(int from, int to);
  std::vector<QueuePtr> queues() const;
  void close_queues(bool together);
  void close_together();
  void leave_all();
  void pause() const;

  const std::shared_ptr<Communicator> host_;
  const DeviceKind kind_;
  const Interrupt interrupt_;
  const LongestWait rendezvous_timeout_;
  const std::optional<DeviceNodes> nodes_;

  std::mutex bootstrap_mutex_;  // held while all ranks bootstrap
  std::mutex pairs_mutex_;      // held while two ranks do
  mutable std::mutex mutex_;    // never held for long; guards what follows
  std::optional<c10::Device> device_;
  bool bootstrapped_ = false;
  QueuePtr all_;                      // null: not bootstrapped, or impossible
  std::map<int, Pair> pairs_;         // by peer; null queues: impossible
  std::vector<c10::Stream> streams_;  // the queues'
  std::shared_ptr<DeviceHeap> heap_;  // null: none
  std::string why_not_ = "no tensor on such a device has come yet";
  std::unique_ptr<DeviceWatchdog> watchdog_;  // once bootstrapped; destroyed first
};

}  // namespace dreamcomm

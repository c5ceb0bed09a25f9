// The interface of a group for an accelerator's tensors. It is not GroupCommunicator
// (comm/group_communicator.h): its calls take torch's tensors and streams, not Requests, and return
// when the call is on a stream, not when it is done.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "c10d/base/call_blocks.h"
#include "c10d/base/op_labels.h"
#include "c10d/device/device_work.h"
#include "comm/group_communicator.h"
#include "core/error.h"

namespace dreamcomm {

/// One call, checked, as it is issued to a device.
struct DevicePlan {
  const OpLabel& label;
  Tensors inputs;
  Tensors outputs;
  Clock::time_point deadline;
  bool async;
  uint64_t sequence;
};

/// Serves the tensors on one device of this rank, or none: torch's own backends take what it does
/// not serve. Ranks are the group's. Thread-safe.
class DeviceCommunicator {
 public:
  DeviceCommunicator() = default;
  virtual ~DeviceCommunicator() = default;
  DeviceCommunicator(const DeviceCommunicator&) = delete;
  DeviceCommunicator& operator=(const DeviceCommunicator&) = delete;

  /// The kind of device that a barrier's device ids number.
  virtual c10::DeviceType type() const = 0;
  /// True if tensors on that device can be served, once the ranks have agreed to.
  virtual bool handles(c10::Device device) const = 0;
  bool handles(const at::Tensor& tensor) const {
    return tensor.layout() == at::kStrided && handles(tensor.device());
  }

  /// True if issue() takes such tensors, with this reduction or, for none, to move them. Collective
  /// at the first tensor that handles() accepts. Throws c10::ValueError for a second device, and
  /// the errors of the ranks' bootstrap.
  virtual bool serves(const at::Tensor& tensor, const std::optional<Reduction>& reduction) = 0;
  /// The same for a barrier on a device.
  virtual bool serves(c10::Device device) = 0;
  /// After serves().
  virtual c10::intrusive_ptr<DeviceWork> issue(const DevicePlan& plan, Calls& calls) = 0;

  /// True if send() and receive() take messages with that rank. At the first one both ranks wait
  /// for each other here; where several pairs do, all ranks must take them in the order of ranks.
  virtual bool connects_with(int peer, c10::Device device) = 0;
  /// After connects_with(). Messages to a rank arrive in the order they were sent, whatever
  /// their tags. Always asynchronous.
  virtual c10::intrusive_ptr<DeviceWork> send(const DevicePlan& plan, const at::Tensor& tensor,
                                              int to) = 0;
  virtual c10::intrusive_ptr<DeviceWork> receive(const DevicePlan& plan, const at::Tensor& tensor,
                                                 int from) = 0;

  /// A tensor of one dimension in registered memory, or in ordinary device memory where that is
  /// full. Only for a device that it handles. Collective at first, as serves().
  virtual at::Tensor allocate(std::int64_t size, const at::TensorOptions& options) = 0;
  /// True if there is registered memory.
  virtual bool allocates() const = 0;
  /// True if the tensor lies in registered memory.
  virtual bool holds(const at::Tensor& tensor) const = 0;

  /// Why a call failed, or nothing.
  virtual std::optional<Error> failure() const = 0;
  virtual void abort() = 0;
  /// Waits for this rank's kernels. `together`: also releases the groups' memory, if the ranks can
  /// agree on it; else ends the kernels if they take long.
  virtual void close(bool together) = 0;
  /// Sets that of torch's engine between nodes, if there is one.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// Bytes of this rank between nodes, in calls on devices.
  virtual std::array<WireTraffic, kKinds> traffic() const = 0;
  /// Says what carries a call on such tensors.
  virtual std::string explain(Kind kind, std::size_t bytes) const = 0;
};

/// Serves nothing: torch's own backends take all tensors on accelerators.
class NoDevices final : public DeviceCommunicator {
 public:
  using DeviceCommunicator::handles;

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  bool handles(c10::Device /*device*/) const override { return false; }
  bool serves(const at::Tensor& /*tensor*/, const std::optional<Reduction>& /*op*/) override {
    return false;
  }
  bool serves(c10::Device /*device*/) override { return false; }
  c10::intrusive_ptr<DeviceWork> issue(const DevicePlan& plan, Calls& calls) override;
  bool connects_with(int /*peer*/, c10::Device /*device*/) override { return false; }
  c10::intrusive_ptr<DeviceWork> send(const DevicePlan& plan, const at::Tensor& tensor,
                                      int to) override;
  c10::intrusive_ptr<DeviceWork> receive(const DevicePlan& plan, const at::Tensor& tensor,
                                         int from) override;
  at::Tensor allocate(std::int64_t size, const at::TensorOptions& options) override;
  bool allocates() const override { return false; }
  bool holds(const at::Tensor& /*tensor*/) const override { return false; }
  std::optional<Error> failure() const override { return std::nullopt; }
  void abort() override {}
  void close(bool /*together*/) override {}
  void set_timeout(std::chrono::milliseconds /*timeout*/) override {}
  std::array<WireTraffic, kKinds> traffic() const override { return {}; }
  std::string explain(Kind kind, std::size_t bytes) const override;
};

}  // namespace dreamcomm

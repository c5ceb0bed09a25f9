// Calls on an accelerator's tensors, carried out by this library's own kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c10d/call.h"
#include "c10d/device_heap.h"
#include "c10d/device_work.h"
#include "comm/communicator.h"
#include "gpu/cuda_driver.h"
#include "gpu/group.h"

namespace dreamcomm {

/// The accelerator, and how its driver is made for the device that is the current one.
struct DeviceKind {
  c10::DeviceType type = c10::DeviceType::CUDA;
  std::function<std::unique_ptr<gpu::Driver>()> make_driver = gpu::make_cuda_driver;
  gpu::GroupOptions options;
};

/// The part of a backend that serves one device of this rank: that of the first tensor.
/// Then the ranks meet (gpu/group.h); until then no device is touched.
///
/// Order. A call runs on the caller's current stream, or, if it is asynchronous, on a
/// stream of its own that waits for the caller's. The driver orders the kernels of a
/// group, whatever their streams. So results are there for whatever the caller puts on
/// his stream after wait(), and the host waits for nothing.
class DeviceCalls {
 public:
  /// One call, checked.
  struct Plan {
    const Label& label;
    Tensors inputs;
    Tensors outputs;
    Clock::time_point deadline;
    bool async;
    uint64_t sequence;
  };

  DeviceCalls(std::shared_ptr<Communicator> comm, DeviceKind kind, Interrupt interrupt,
              std::chrono::milliseconds meeting_time);

  /// Whether kernels carry out this reduction, or for none a movement, of such tensors.
  /// Collective at the first tensor that they would serve. Throws c10::ValueError for a
  /// second device, and what befalls the meeting.
  bool serves(const at::Tensor& tensor, const std::optional<Reduction>& reduction);
  /// The same for a barrier on a device.
  bool serves(c10::Device device);
  c10::DeviceType type() const { return kind_.type; }

  /// A tensor of one dimension in registered memory, or, where there is none left, the
  /// system's. Collective at first, as serves().
  at::Tensor allocate(std::int64_t size, const at::TensorOptions& options);
  bool allocates() const { return kind_.options.heap_bytes > 0; }
  /// Whether the tensor lies in registered memory.
  bool holds(const at::Tensor& tensor) const;

  /// Puts the calls, parts of one, on their stream. Throws what torch expects.
  c10::intrusive_ptr<DeviceWork> issue(int rank, const Plan& plan, Calls& calls);

  /// Why a call failed, or nothing. Any thread, as the next one.
  std::optional<Error> failure() const;
  void abort();
  /// Waits for this rank's kernels. `together`: and releases the group's memory, if the
  /// ranks can agree on it; else ends them if they take long.
  void close(bool together);
  /// For people.
  std::string describe() const;

 private:
  bool meet_on(c10::Device device);
  gpu::Exchange exchange(std::chrono::milliseconds longest) const;
  c10::Stream stream_for(const Plan& plan);
  bool ends_within(std::chrono::milliseconds longest) const;
  /// Says whether they were captured into a graph.
  bool run_parts(const Plan& plan, Calls& calls, const c10::Stream& stream);
  void keep_until(std::shared_ptr<const c10::Event> done, Calls& calls);
  std::shared_ptr<gpu::Group> group() const;
  std::shared_ptr<DeviceHeap> heap() const;

  const std::shared_ptr<Communicator> comm_;
  const DeviceKind kind_;
  const Interrupt interrupt_;
  const std::chrono::milliseconds meeting_time_;

  std::mutex calling_;  // one call at a time, and of these:
  std::optional<c10::Device> device_;
  std::optional<c10::Stream> side_;
  std::shared_ptr<const c10::Event> last_;  // behind the last call
  // Asynchronous calls that may be on registered memory, of which torch's allocator is
  // not told who uses it.
  struct Kept {
    std::shared_ptr<const c10::Event> done;
    Calls calls;
  };
  std::vector<Kept> kept_;
  mutable std::mutex mutex_;  // never held for long; of these:
  std::shared_ptr<gpu::Group> group_;
  std::shared_ptr<DeviceHeap> heap_;  // null: none
  std::string why_not_ = "no tensor on such a device has come yet";
};

}  // namespace dreamcomm

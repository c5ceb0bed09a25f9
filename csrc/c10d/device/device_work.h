// The work that torch gets for a call on an accelerator's tensors: done when its stream is.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <optional>

#include "c10d/base/op_labels.h"
#include "c10d/base/profiled_work.h"
#include "gpu/host/communicator.h"

namespace dreamcomm {

/// A call on a stream. wait() orders the caller's current stream behind it, as with NCCL, and does
/// not block the host, unless it has a timeout or the call is a barrier. A failed kernel is
/// reported by the next call, wait(timeout) or isCompleted().
class DeviceWork final : public ProfiledWork {
 public:
  /// `done` has been recorded on `stream` behind the call's last step; `captured`: into a graph,
  /// whose events cannot be queried.
  DeviceWork(int rank, const OpLabel& label, Tensors inputs, Tensors outputs,
             const c10::Stream& stream, std::shared_ptr<const c10::Event> done, bool captured,
             std::shared_ptr<const gpu::Communicator> group, uint64_t sequence);

  bool isCompleted() override;
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  /// Its value is ready for streams that wait for it as torch's futures do.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  bool is_done() const;
  void wait_here(std::chrono::milliseconds timeout);
  void rethrow_failure() const;

  const OpLabel label_;
  const std::vector<at::Tensor> outputs_;
  const c10::Stream stream_;
  const std::shared_ptr<const c10::Event> done_;
  const bool captured_;
  const std::shared_ptr<const gpu::Communicator> group_;
  const uint64_t sequence_;
  // Stored when the event was first seen done: a later call's failure is not this one's.
  mutable std::mutex found_mutex_;
  mutable bool found_ = false;
  mutable std::exception_ptr failure_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_
};

}  // namespace dreamcomm

// The works that torch gets for a collective or a message.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <string_view>

#include "c10d/base/op_labels.h"
#include "c10d/base/profiled_work.h"
#include "c10d/work/callback_threads.h"
#include "comm/group_communicator.h"
#include "comm/p2p/completion.h"

namespace dreamcomm {

/// Completed once, by the thread that ran the call. Its Future holds the outputs as List[Tensor]; a
/// Future that is taken before the call is done completes on one of `callback_threads`, never on
/// the progress thread.
class DreamWork : public ProfiledWork {
 public:
  /// `callback_threads` may be null for a call that is done before torch sees its work.
  DreamWork(int rank, const OpLabel& label, Tensors inputs, Tensors outputs,
            std::shared_ptr<CallbackThreads> callback_threads,
            std::weak_ptr<GroupCommunicator> communicator = {});

  void complete(std::exception_ptr error);
  /// The same without an error, before another thread has seen the work: no locks.
  void complete_unshared();

  /// Interruptible by signals. `timeout` (0: none) ends the wait, not the call.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override {}
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

  /// The caller's thread-local state of torch; null if the call ran on its thread.
  const at::ThreadLocalState* caller() const { return caller_ ? &*caller_ : nullptr; }
  void set_sequence(uint64_t sequence) { sequence_ = sequence; }

 protected:
  /// Helps the call along until it is done; throws only what `pause` throws.
  virtual void advance(const Interrupt& pause);
  const char* name() const { return label_.name(); }
  /// Which rank this one waits for, after so long: " on rank 0 of 2 in group 'default', ..."; or
  /// "".
  virtual std::string awaited(std::chrono::milliseconds waited) const;
  std::shared_ptr<GroupCommunicator> communicator() const { return communicator_.lock(); }

 private:
  void require_home() const;
  Interrupt pause_until(std::chrono::milliseconds timeout) const;
  void settle(c10::ivalue::Future& future);

  const OpLabel label_;
  const c10::SmallVector<at::Tensor, 1> outputs_;
  const std::shared_ptr<CallbackThreads> callback_threads_;
  // Not kept alive: its progress thread may drop the last reference to a work.
  const std::weak_ptr<GroupCommunicator> communicator_;
  std::optional<at::ThreadLocalState> caller_;  // what callbacks run under
  uint64_t sequence_ = 0;
  bool was_done_ = false;                           // before torch saw it
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_, as is:
  bool settled_ = false;                            // future_ is complete, or is being completed
};

/// A message.
class MessageWork final : public DreamWork {
 public:
  MessageWork(int rank, const OpLabel& label, const at::Tensor& tensor,
              std::shared_ptr<CallbackThreads> callback_threads,
              std::weak_ptr<GroupCommunicator> communicator);

  /// Completes this work when the message is done; `received` runs before.
  void follow(std::shared_ptr<Completion> completion, std::function<void()> received);
  int sourceRank() const override;
  /// Ends a receive that no thread waits for, unless its message is there.
  void cancel();

 private:
  void advance(const Interrupt& pause) override;
  std::string awaited(std::chrono::milliseconds waited) const override;

  std::shared_ptr<Completion> completion_;
};

/// Several works as one: done when all are, failed with the first that failed.
class GroupWork final : public ProfiledWork {
 public:
  explicit GroupWork(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  /// Cancels each message, as MessageWork::cancel().
  void cancel() const;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace dreamcomm

// The records of calls for torch's profiler. Invariant: a record ends on the thread, and within the
// function, that began it. If the profiler's run is over when a record ends, torch writes to memory
// that it has freed.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

namespace dreamcomm {

/// Its constructor begins a record, under the title or the name that the caller has set
/// (torch.distributed.record_comm), and would leave it open until the work is done, on any thread.
class ProfiledWork : public c10d::Work {
 public:
  using Work::Work;
  /// Title and inputs matter only where a profiler listens.
  ProfiledWork(int rank, c10d::OpType type, const char* title, c10::ArrayRef<at::Tensor> inputs)
      : ProfiledWork(rank, type, title, inputs, at::hasCallbacks()) {}

  /// Ends the record with the scope.
  class Record {
   public:
    explicit Record(std::function<void()> end) : end_(std::move(end)) {}
    ~Record() {
      if (end_) end_();
    }
    Record(const Record&) = delete;
    Record& operator=(const Record&) = delete;

   private:
    const std::function<void()> end_;
  };

  /// To be called before another thread sees the work.
  Record take_record() { return Record(std::exchange(recordFunctionEndCallback_, nullptr)); }

 private:
  ProfiledWork(int rank, c10d::OpType type, const char* title, c10::ArrayRef<at::Tensor> inputs,
               bool shows)
      : Work(rank, type, shows ? title : nullptr,
             shows ? std::optional(inputs.vec()) : std::nullopt) {}
};

/// Shows a wait for a call of this name.
class ProfiledWait {
 public:
  explicit ProfiledWait(const char* name) {
    if (at::hasCallbacks()) show(name);
  }

 private:
  void show(const char* name);

  std::string title_;  // outlives a record that refers to it
  std::optional<at::RecordFunction> record_;
};

/// Gives this thread the state of the caller's, to run a part of its call or a callback. Profiles
/// show neither operations nor memory, as they may go on after the caller ends the profiler's run.
class AsCaller {
 public:
  explicit AsCaller(const at::ThreadLocalState& caller) : state_(caller) {}

 private:
  const at::ThreadLocalStateGuard state_;
  const at::DisableRecordFunctionGuard unseen_;
  const c10::DebugInfoGuard without_memory_{c10::DebugInfoKind::PROFILER_STATE, nullptr};
};

}  // namespace dreamcomm

// What torch's profiler sees of a call.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <optional>
#include <string>

#include "c10d/work.h"

namespace dreamcomm {

/// Shows a call, or a wait for one, from here to the end of the scope. Invariant: a record ends in
/// the scope that began it. One of c10d::Work ends with the work, on any thread, and if the
/// profiler's run is over by then, torch writes to memory that it has freed.
class Profiled {
 public:
  Profiled(const Label& label, Tensors inputs) {
    if (at::hasCallbacks()) show_call(label, inputs);
  }
  /// A wait for it.
  explicit Profiled(const Label& label) {
    if (at::hasCallbacks()) show_wait(label);
  }

 private:
  void show_call(const Label& label, Tensors inputs);
  void show_wait(const Label& label);

  std::string title_;  // outlives the record, which refers to it
  std::optional<at::RecordFunction> record_;
};

/// The state that the caller's thread had, for what another does of its call: unseen by profilers,
/// as it may go on when the caller ends their run.
class AsCaller {
 public:
  explicit AsCaller(const at::ThreadLocalState& caller) : state_(caller) {}

 private:
  const at::ThreadLocalStateGuard state_;
  const at::DisableRecordFunctionGuard unseen_;
};

}  // namespace dreamcomm

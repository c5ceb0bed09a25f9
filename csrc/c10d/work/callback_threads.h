// Threads that complete futures. Not the progress thread: a callback may wait for
// a collective of the same group, which only the progress thread can run.
#pragma once

#include <functional>
#include <memory>

#include "c10d/process/fork_guard.h"

namespace dreamcomm {

/// Runs tasks, each on an idle thread if there is one, else on a new one: a task
/// that waits for another never stops it. Threads start with the first task.
class CallbackThreads {
 public:
  CallbackThreads();
  ~CallbackThreads();  // as stop()
  CallbackThreads(const CallbackThreads&) = delete;
  CallbackThreads& operator=(const CallbackThreads&) = delete;

  /// The task must not throw. After stop() it runs here and now. Any thread.
  void post(std::function<void()> task);
  /// Waits until all tasks have run and the threads have ended, except the calling thread if a task
  /// calls this. Idempotent.
  void stop();
  /// True if this is the process that has the threads, not a forked child.
  bool at_home() const { return process_.at_home(); }

 private:
  struct State;
  const ForkGuard process_;
  std::shared_ptr<State> state_;
};

}  // namespace dreamcomm

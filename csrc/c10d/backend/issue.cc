// Runs a checked call: here, later on the progress thread, or by torch's own backend.
#include <algorithm>
#include <optional>

#include "c10d/backend/backend.h"
#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"
#include "c10d/base/op_labels.h"

namespace dreamcomm {
namespace {

/// Ends a call at a part with a mismatch: the parts before it are done.
[[noreturn]] void end_batch(Calls& calls, std::size_t done, const Error& mismatch) {
  if (done == 0) throw mismatch;
  for (std::size_t i = 0; i < done; ++i) calls[i].unstage();
  throw Error(mismatch.kind(), concat(mismatch.what(), ". In its batch, the ", done,
                                      done == 1 ? " call before it was" : " calls before it were",
                                      " carried out: repeat only the rest"));
}

/// Runs the parts of one call, in the call's turn. All are staged before the first is sent: so no
/// part of a coalesced call sees what another writes, and a tensor that cannot be staged fails the
/// call before any part runs.
void run_parts(GroupCommunicator& group, Calls& calls, Clock::time_point deadline,
               const Interrupt& interrupt) {
  for (Call& call : calls) call.stage();
  std::size_t rest = calls.size();
  try {
    for (Call& call : calls) group.run_ordered(call.request(deadline, --rest), interrupt);
  } catch (const Error& error) {
    // A mismatch ends the call on all ranks alike. After another error this rank would be parts
    // behind its peers, and its next call would match one of the parts.
    if (error.kind() == ErrorKind::kMismatch) end_batch(calls, calls.size() - rest - 1, error);
    group.abort(error.what());
    throw;
  }
  for (Call& call : calls) call.unstage();
}

void leave_to_peers_if_failed(const GroupCommunicator& group, const Calls& calls) {
  if (!group.failure_kind()) return;
  for (const Call& call : calls) call.leave_to_peers();
}

/// True if the call is on an accelerator's tensors; all of a call are on one device.
bool on_device(Tensors inputs, Tensors outputs) {
  const Tensors some = inputs.empty() ? outputs : inputs;
  return !some.empty() && !some[0].is_cpu();
}

bool all_direct(const Calls& calls) {
  return std::all_of(calls.begin(), calls.end(), [](const Call& call) { return call.direct(); });
}

/// Calls under way on the progress thread. It always completes its work, also if it is dropped. It
/// must not own the communicator, whose thread destroys it.
class Job {
 public:
  Job(c10::intrusive_ptr<DreamWork> work, Calls calls, std::chrono::milliseconds timeout,
      std::shared_ptr<Outstanding> pending)
      : work_(std::move(work)),
        calls_(std::move(calls)),
        timeout_(timeout),
        outstanding_(std::move(pending)) {
    outstanding_->begin();
  }
  ~Job() {
    if (work_) {
      finish(to_torch(Error(ErrorKind::kAborted, "the call was dropped with its group")));
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  void run(GroupCommunicator& group) {
    std::exception_ptr error;
    try {
      const auto deadline = deadline_after(timeout_, timeout_);
      std::optional<AsCaller> as_caller;  // staging runs torch's operations
      if (!all_direct(calls_)) as_caller.emplace(*work_->caller());
      run_parts(group, calls_, deadline, {});
    } catch (...) {
      error = current_as_torch();
      leave_to_peers_if_failed(group, calls_);
    }
    finish(error);
  }

 private:
  void finish(std::exception_ptr error) {
    calls_.clear();
    const c10::intrusive_ptr<DreamWork> work = std::move(work_);
    work->complete(std::move(error));
    outstanding_->end();
  }

  c10::intrusive_ptr<DreamWork> work_;
  Calls calls_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Outstanding> outstanding_;
};

}  // namespace

bool DreamBackend::serves(const Tensor& tensor) const {
  if (shares(tensor)) return true;
  if (!tensor.defined() || !devices_->handles(tensor)) return false;
  require_open();
  return devices_->serves(tensor, std::nullopt);
}

bool DreamBackend::serves(const Site& site, const Tensor& tensor, const c10d::ReduceOp& op) const {
  if (shares(tensor)) return true;
  if (!tensor.defined() || !devices_->handles(tensor)) return false;
  require_open();
  return devices_->serves(tensor, plainly(op, tensor, site));
}

bool DreamBackend::serves_all(const Site& site, const TensorList& tensors,
                              const c10d::ReduceOp& op) const {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const Tensor& tensor) { return serves(site, tensor, op); });
}

const at::Tensor& DreamBackend::only(const Site& site, const char* argument,
                                     const TensorList& tensors) const {
  require_length(site, argument, tensors.size(), 1);
  TORCH_CHECK_VALUE(tensors[0].defined(), site, "expected '", argument,
                    "' to be a tensor, got an undefined one");
  return tensors[0];
}

WorkPtr DreamBackend::issue(const Plan& plan, Calls& calls) {
  if (on_device(plan.inputs, plan.outputs)) return issue_on_device(plan, calls);
  require_open();
  require_turn(plan.label);
  sequence_.add(1);
  if (plan.async || coalescing()) return collect(run_later(plan, calls));
  const auto sequence = static_cast<uint64_t>(sequence_.read());
  auto work = c10::make_intrusive<DreamWork>(rank_, plan.label, plan.inputs, plan.outputs, nullptr);
  work->set_sequence(sequence);
  try {
    run_here(calls, deadline_after(plan.timeout, timeout()));
  } catch (...) {
    leave_to_peers_if_failed(*cpu_, calls);
    std::rethrow_exception(current_as_torch());
  }
  work->complete_unshared();
  return work;
}

WorkPtr DreamBackend::issue_on_device(const Plan& plan, Calls& calls) {
  require_open();
  require_turn(plan.label);
  sequence_.add(1);
  return collect(devices_->issue({.label = plan.label,
                                  .inputs = plan.inputs,
                                  .outputs = plan.outputs,
                                  .deadline = deadline_after(plan.timeout, timeout()),
                                  .async = plan.async || coalescing(),
                                  .sequence = static_cast<uint64_t>(sequence_.read())},
                                 calls));
}

/// Refuses a call that a signal's handler makes: it would wait for the call that the handler
/// interrupted, which waits for the handler.
void DreamBackend::require_turn(const OpLabel& label) const {
  TORCH_CHECK_WITH(DistBackendError, handling_.read() == 0 || !on_main_thread(), label.name(),
                   " on rank ", rank_, " of ", size_, " was called by a signal's handler while ",
                   "this rank waits in a call of the same group, which it would have to wait for: "
                   "let the handler set a flag, and make the call after that one");
}

void DreamBackend::run_here(Calls& calls, Clock::time_point deadline) {
  if (calls.size() == 1 && calls[0].direct()) {
    cpu_->run(calls[0].request(deadline, 0), interrupt_);
    return;
  }
  cpu_->run_in_turn([&] { run_parts(*cpu_, calls, deadline, interrupt_); }, interrupt_);
}

WorkPtr DreamBackend::run_later(const Plan& plan, Calls& calls) {
  auto work = c10::make_intrusive<DreamWork>(rank_, plan.label, plan.inputs, plan.outputs,
                                             callback_threads_, cpu_);
  work->set_sequence(static_cast<uint64_t>(sequence_.read()));
  const ProfiledWork::Record shown = work->take_record();
  auto job = std::make_shared<Job>(work, std::move(calls), timeout_of(plan.timeout), outstanding_);
  cpu_->submit([job, group = cpu_.get()] { job->run(*group); });
  return work;
}

WorkPtr DreamBackend::forward_to(const std::string& device_type,
                                 const std::function<WorkPtr(c10d::Backend&)>& operation) {
  const Fallback::Inner inner = fallback_.get(device_type);
  const bool together = inner->supportsCoalescing() && join_coalescing(inner);
  WorkPtr work = operation(*inner);  // without a lock: it may wait for its peers
  return together ? work : collect(work);
}

/// True if calls are being coalesced; then `inner` coalesces, too. NCCL must start
/// such calls together: one at a time they deadlock.
bool DreamBackend::join_coalescing(const Fallback::Inner& inner) {
  const std::scoped_lock lock(coalescing_mutex_);
  if (!coalescing_) return false;
  auto& inners = coalescing_->inners;
  if (std::find(inners.begin(), inners.end(), inner) == inners.end()) {
    inner->startCoalescing();
    inners.push_back(inner);
  }
  return true;
}

WorkPtr DreamBackend::collect(WorkPtr work) {
  if (!coalescing()) return work;
  const std::scoped_lock lock(coalescing_mutex_);
  if (coalescing_) coalescing_->works.push_back(work);
  return work;
}

void DreamBackend::startCoalescing() {
  std::optional<Coalescing> abandoned;
  {
    // A batch that was not ended: torch leaves it so when a call inside of it raises. The calls
    // before that one are under way.
    const std::scoped_lock lock(coalescing_mutex_);
    abandoned.swap(coalescing_);
    coalescing_.emplace();
    coalesces_.set(1);
  }
  if (!abandoned) return;
  for (const Fallback::Inner& inner : abandoned->inners) inner->endCoalescing();
}

void DreamBackend::cancel_coalescing() {
  std::optional<Coalescing> abandoned;
  {
    const std::scoped_lock lock(coalescing_mutex_);
    abandoned.swap(coalescing_);
    coalesces_.set(0);
  }
  if (!abandoned) return;
  GroupWork(std::move(abandoned->works)).cancel();
  for (const Fallback::Inner& inner : abandoned->inners) inner->endCoalescing();
}

WorkPtr DreamBackend::endCoalescing() {
  try {
    if (const std::exception_ptr error = refused()) std::rethrow_exception(error);
    send_put_off();
  } catch (...) {
    cancel_coalescing();
    throw;
  }
  std::optional<Coalescing> collected;
  {
    const std::scoped_lock lock(coalescing_mutex_);
    collected.swap(coalescing_);
    coalesces_.set(0);
  }
  TORCH_CHECK_VALUE(collected, "rank ", rank_, ": coalescing ends that was not started");
  for (const Fallback::Inner& inner : collected->inners) {
    if (WorkPtr work = inner->endCoalescing()) collected->works.push_back(work);
  }
  if (collected->works.size() == 1) return collected->works[0];
  return c10::make_intrusive<GroupWork>(std::move(collected->works));
}

}  // namespace dreamcomm

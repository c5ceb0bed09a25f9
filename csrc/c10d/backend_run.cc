// How a checked call runs: here, later on the progress thread, or elsewhere.
#include <algorithm>

#include "c10d/backend.h"
#include "c10d/convert.h"
#include "c10d/labels.h"

namespace dreamcomm {
namespace {

/// Calls under way on the progress thread. Whatever becomes of it, its work is
/// completed. It must not own the communicator, whose thread destroys it.
class Job {
 public:
  Job(c10::intrusive_ptr<DreamWork> work, Calls calls, std::chrono::milliseconds timeout,
      std::shared_ptr<Pending> pending)
      : work_(std::move(work)),
        calls_(std::move(calls)),
        timeout_(timeout),
        pending_(std::move(pending)) {
    pending_->begin();
  }
  ~Job() {
    if (work_) {
      finish(to_torch(Error(ErrorKind::kAborted, "the call was dropped with its group")));
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  void run(Communicator& communicator) {
    std::exception_ptr error;
    try {
      const auto deadline = deadline_after(timeout_, timeout_);
      for (Call& call : calls_) {
        call.stage();
        communicator.run_ordered(call.request(deadline));
        call.unstage();
      }
    } catch (...) {
      error = current_as_torch();
    }
    finish(error);
  }

 private:
  void finish(std::exception_ptr error) {
    calls_.clear();
    const c10::intrusive_ptr<DreamWork> work = std::move(work_);
    work->complete(std::move(error));
    pending_->end();
  }

  c10::intrusive_ptr<DreamWork> work_;
  Calls calls_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Pending> pending_;
};

}  // namespace

bool DreamBackend::serves(const Tensor& tensor) const {
  return comm_ && tensor.defined() && tensor.is_cpu();
}

const at::Tensor& DreamBackend::only(const Site& site, const char* argument,
                                     const TensorList& tensors) const {
  require_length(site, argument, tensors.size(), 1);
  TORCH_CHECK_VALUE(tensors[0].defined(), site, "expected '", argument,
                    "' to be a tensor, got an undefined one");
  return tensors[0];
}

WorkPtr DreamBackend::issue(const Plan& plan, Calls& calls) {
  require_open();
  sequence_.add(1);
  if (plan.async || coalescing()) return collect(run_later(plan, calls));
  auto work = c10::make_intrusive<DreamWork>(rank_, plan.label, plan.inputs, plan.outputs, nullptr);
  work->set_sequence(static_cast<uint64_t>(sequence_.read()));
  try {
    run_here(calls, deadline_after(plan.timeout, timeout()));
  } catch (...) {
    raise_current();
  }
  work->complete(nullptr);
  return work;
}

void DreamBackend::run_here(Calls& calls, Clock::time_point deadline) {
  if (calls.size() == 1 && calls[0].direct()) {
    comm_->run(calls[0].request(deadline), interrupt_);
    return;
  }
  comm_->run_in_turn([&] {
    for (Call& call : calls) {
      call.stage();
      comm_->run_ordered(call.request(deadline), interrupt_);
      call.unstage();
    }
  });
}

WorkPtr DreamBackend::run_later(const Plan& plan, Calls& calls) {
  auto work =
      c10::make_intrusive<DreamWork>(rank_, plan.label, plan.inputs, plan.outputs, executor_);
  work->set_sequence(static_cast<uint64_t>(sequence_.read()));
  auto job = std::make_shared<Job>(work, std::move(calls), timeout_of(plan.timeout), pending_);
  comm_->submit([job, communicator = comm_.get()] { job->run(*communicator); });
  return work;
}

WorkPtr DreamBackend::forward_to(const std::string& device_type,
                                 const std::function<WorkPtr(c10d::Backend&)>& operation) {
  const Fallback::Inner inner = fallback_.get(device_type);
  sequence_.add(1);
  const std::scoped_lock lock(coalescing_mutex_);
  if (!coalescing_) return operation(*inner);
  // NCCL must know that these calls belong together: one at a time they deadlock.
  if (inner->supportsCoalescing()) {
    auto& inners = coalescing_->inners;
    if (std::find(inners.begin(), inners.end(), inner) == inners.end()) {
      inner->startCoalescing();
      inners.push_back(inner);
    }
    return operation(*inner);
  }
  coalescing_->works.push_back(operation(*inner));
  return coalescing_->works.back();
}

bool DreamBackend::coalescing() {
  const std::scoped_lock lock(coalescing_mutex_);
  return coalescing_.has_value();
}

WorkPtr DreamBackend::collect(WorkPtr work) {
  const std::scoped_lock lock(coalescing_mutex_);
  if (coalescing_) coalescing_->works.push_back(work);
  return work;
}

void DreamBackend::startCoalescing() {
  const std::scoped_lock lock(coalescing_mutex_);
  TORCH_CHECK_VALUE(!coalescing_, "rank ", rank_, ": coalescing has been started already");
  coalescing_.emplace();
}

WorkPtr DreamBackend::endCoalescing() {
  std::optional<Coalescing> collected;
  {
    const std::scoped_lock lock(coalescing_mutex_);
    collected.swap(coalescing_);
  }
  TORCH_CHECK_VALUE(collected, "rank ", rank_, ": coalescing ends that was not started");
  for (const Fallback::Inner& inner : collected->inners) {
    if (WorkPtr work = inner->endCoalescing()) collected->works.push_back(work);
  }
  if (collected->works.size() == 1) return collected->works[0];
  return c10::make_intrusive<GroupWork>(std::move(collected->works));
}

}  // namespace dreamcomm

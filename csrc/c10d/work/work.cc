#include "c10d/work/work.h"

#include <c10/util/Exception.h>

#include <utility>

#include "c10d/base/convert.h"
#include "c10d/base/gil_signals.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// How long a waiting thread sleeps between looks at Python's signals.
constexpr milliseconds kLook{50};

c10::TypePtr tensor_list() { return c10::ListType::create(c10::TensorType::get()); }

}  // namespace

DreamWork::DreamWork(int rank, const OpLabel& label, Tensors inputs, Tensors outputs,
                     std::shared_ptr<CallbackThreads> callback_threads,
                     std::weak_ptr<GroupCommunicator> communicator)
    : ProfiledWork(rank, label.type, label.title, inputs),
      label_(label),
      outputs_(outputs.begin(), outputs.end()),
      callback_threads_(std::move(callback_threads)),
      communicator_(std::move(communicator)) {
  if (callback_threads_) caller_.emplace();
}

void DreamWork::complete(std::exception_ptr error) {
  finish(std::move(error));
  {
    const std::scoped_lock lock(mutex_);
    if (!future_ || settled_) return;
    settled_ = true;
  }
  callback_threads_->post([work = c10::intrusive_ptr<DreamWork>::reclaim_copy(this)] {
    const AsCaller as_caller(*work->caller_);
    work->settle(*work->future_);
  });
}

void DreamWork::complete_unshared() {
  completed_ = true;
  was_done_ = true;
  take_record();
}

void DreamWork::settle(c10::ivalue::Future& future) {
  if (exception_) {
    future.setError(exception_);
  } else {
    future.markCompleted(std::vector<at::Tensor>(outputs_.begin(), outputs_.end()));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> DreamWork::getFuture() {
  if (!isCompleted()) require_home();
  const std::scoped_lock lock(mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(tensor_list());
    if (completed_) {
      settled_ = true;
      settle(*future_);
    }
  }
  return future_;
}

std::vector<at::Tensor> DreamWork::result() {
  TORCH_CHECK(isCompleted(), name(), ": the work is not done; call wait() before result()");
  return {outputs_.begin(), outputs_.end()};
}

bool DreamWork::wait(milliseconds timeout) {
  if (was_done_) return true;
  if (!isCompleted()) {
    require_home();
    const ProfiledWait seen(name());
    advance(pause_until(bounded(timeout)));
  }
  std::unique_lock lock(mutex_);
  const c10::intrusive_ptr<c10::ivalue::Future> future = future_;
  const std::exception_ptr error = exception_;
  lock.unlock();
  // After wait() the value of a future that was taken before is there, too.
  if (future) future->wait();
  if (error) std::rethrow_exception(error);
  return true;
}

/// A forked child has neither the memory of the group nor a thread that would complete the work.
void DreamWork::require_home() const {
  TORCH_CHECK_WITH(DistBackendError, !callback_threads_ || callback_threads_->at_home(), name(),
                   ": this process was forked from the rank that made the call, and is none "
                   "itself: wait for it there");
}

Interrupt DreamWork::pause_until(milliseconds timeout) const {
  const Clock::time_point begin = Clock::now();
  return [this, timeout, begin] {
    check_signals();
    if (timeout == kNoTimeout || Clock::now() - begin < timeout) return;
    TORCH_CHECK_WITH(DistBackendError, false, name(), ": Timed out waiting ", timeout.count(),
                     " ms for this work", awaited(timeout), "; the call itself goes on");
  };
}

std::string DreamWork::awaited(milliseconds waited) const {
  const std::shared_ptr<GroupCommunicator> group = communicator();
  if (!group) return "";
  const std::string whom = group->awaited(waited);
  return concat(" on ", group->who(), whom.empty() ? "" : ", which waits for ", whom);
}

std::string MessageWork::awaited(milliseconds waited) const {
  const std::shared_ptr<GroupCommunicator> group = communicator();
  if (!group) return "";
  const std::string lacks = group->awaited(*completion_, waited);
  return concat(" on ", group->who(), lacks.empty() ? "" : ": ", lacks);
}

void DreamWork::advance(const Interrupt& pause) {
  std::unique_lock lock(mutex_);
  while (!cv_.wait_for(lock, kLook, [this] { return completed_; })) {
    lock.unlock();
    pause();
    lock.lock();
  }
}

MessageWork::MessageWork(int rank, const OpLabel& label, const at::Tensor& tensor,
                         std::shared_ptr<CallbackThreads> callback_threads,
                         std::weak_ptr<GroupCommunicator> communicator)
    : DreamWork(rank, label, tensor, tensor, std::move(callback_threads), std::move(communicator)) {
}

void MessageWork::follow(std::shared_ptr<Completion> completion, std::function<void()> received) {
  completion_ = std::move(completion);
  auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  completion_->then([self, received = std::move(received)](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
      const AsCaller as_caller(*self->caller());
      if (received) received();
    } catch (...) {
      self->complete(current_as_torch());
      return;
    }
    self->complete(nullptr);
  });
}

int MessageWork::sourceRank() const { return completion_->source(); }

void MessageWork::advance(const Interrupt& pause) {
  if (const std::shared_ptr<GroupCommunicator> group = communicator()) {
    try {
      group->wait(*completion_, pause);
    } catch (const Error& error) {
      if (!completion_->done()) std::rethrow_exception(to_torch(error));
      // The message failed: the work holds its error.
    } catch (const c10::DistBackendError&) {
      throw;  // wait()'s own timeout: the message goes on
    } catch (...) {
      cancel();  // Ctrl-C
      throw;
    }
  }
  DreamWork::advance(pause);
}

void MessageWork::cancel() {
  if (const std::shared_ptr<GroupCommunicator> group = communicator()) group->cancel(*completion_);
}

GroupWork::GroupWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : ProfiledWork(-1, c10d::OpType::COALESCED), works_(std::move(works)) {
  take_record();  // it has one only where the caller has set a name
}

bool GroupWork::isCompleted() {
  for (const auto& work : works_) {
    if (!work->isCompleted()) return false;
  }
  return true;
}

bool GroupWork::isSuccess() const { return exception() == nullptr; }

std::exception_ptr GroupWork::exception() const {
  for (const auto& work : works_) {
    if (std::exception_ptr error = work->exception()) return error;
  }
  return nullptr;
}

bool GroupWork::wait(milliseconds timeout) {
  try {
    for (const auto& work : works_) work->wait(timeout);
  } catch (const std::exception& error) {
    if (is_foreign(error)) cancel();  // Ctrl-C; if one has failed, or is late, the others go on
    throw;
  }
  return true;
}

/// A caller that stops waiting for all of them waits for none again.
void GroupWork::cancel() const {
  for (const auto& work : works_) {
    if (auto* message = dynamic_cast<MessageWork*>(work.get())) message->cancel();
  }
}

void GroupWork::synchronize() {
  for (const auto& work : works_) work->synchronize();
}

std::vector<at::Tensor> GroupWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    for (const at::Tensor& tensor : work->result()) all.push_back(tensor);
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> GroupWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> parts(c10::FutureType::create(tensor_list()));
  for (const auto& work : works_) parts.push_back(work->getFuture());
  const auto gather = [parts](c10::ivalue::Future& done) -> c10::IValue {
    if (done.hasError()) std::rethrow_exception(done.exception_ptr());
    std::vector<at::Tensor> all;
    for (const c10::intrusive_ptr<c10::ivalue::Future>& part : parts) {
      for (const at::Tensor& tensor : part->value().toTensorVector()) all.push_back(tensor);
    }
    return all;
  };
  return c10::collectAll(parts)->then(gather, tensor_list());
}

}  // namespace dreamcomm

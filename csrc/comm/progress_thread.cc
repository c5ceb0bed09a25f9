#include "comm/progress_thread.h"

#include <algorithm>
#include <chrono>

#include "core/signals.h"
#include "transport/wait.h"

namespace dreamcomm {
namespace {

class MessageCheck final : public WaitObserver {
 public:
  explicit MessageCheck(const std::function<void()>& message_check)
      : message_check_(message_check) {}
  void look(int) override { message_check_(); }

 private:
  const std::function<void()>& message_check_;
};

}  // namespace

ProgressThread::ProgressThread(RankState& state, TicketLock& ticket_lock, TagMatcher& matcher,
                               const std::function<void()>& message_check)
    : state_(state), ticket_lock_(ticket_lock), matcher_(matcher), message_check_(message_check) {}

void ProgressThread::submit(Job job, const std::shared_ptr<void>& owner) {
  {
    // The turn is taken under the lock, so that turns ascend in the queue.
    std::scoped_lock lock(mutex_);
    if (stopping_) return;  // it would not run; its destructor informs its owner
    jobs_.emplace_back(ticket_lock_.take(), std::move(job));
    start_locked(owner);
  }
  state_.ring_own();
}

void ProgressThread::skip(TicketLock::Turn turn, const std::shared_ptr<void>& owner) {
  {
    std::scoped_lock lock(mutex_);
    if (stopping_) return;  // the turns behind it fail, because the rank has left
    const auto later = std::find_if(jobs_.begin(), jobs_.end(),
                                    [&](const auto& job) { return reached(job.first, turn); });
    jobs_.emplace(later, turn, Job{});
    start_locked(owner);
  }
  state_.ring_own();
}

void ProgressThread::start(const std::shared_ptr<void>& owner) {
  {
    std::scoped_lock lock(mutex_);
    start_locked(owner);
  }
  state_.ring_own();
}

void ProgressThread::start_locked(const std::shared_ptr<void>& owner) {
  if (thread_.joinable() || stopping_) return;
  thread_ = std::thread([this, owner] {
    block_signals();
    work();
  });
}

void ProgressThread::stop() {
  std::thread thread;
  {
    std::scoped_lock lock(mutex_);
    stopping_ = true;
    thread = std::move(thread_);
  }
  state_.ring_own();
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();  // a callback of the last job ends the group; `owner` lives on
  } else {
    thread.join();
  }
}

bool ProgressThread::has_turn() {
  std::scoped_lock lock(mutex_);
  return !jobs_.empty() && ticket_lock_.is_up(jobs_.front().first);
}

bool ProgressThread::is_finished() {
  std::scoped_lock lock(mutex_);
  return stopping_ && jobs_.empty();
}

bool ProgressThread::run_next() {
  if (!has_turn()) return false;
  std::unique_lock lock(mutex_);
  const auto [turn, job] = std::move(jobs_.front());
  jobs_.pop_front();
  lock.unlock();
  if (job) job();
  ticket_lock_.pass(turn);
  state_.ring_own();
  return true;
}

void ProgressThread::work() {
  MessageCheck observer(message_check_);
  Patience patience(0, 2);
  constexpr int kBusyRounds = 64;
  int busy = 0;
  while (true) {
    while (run_next()) {
    }
    if (is_finished()) return;
    // While messages keep moving no wait is long, so no wait would call message_check_.
    if (++busy % kBusyRounds == 0) message_check_();
    if (matcher_.busy()) {
      wait_until(
          state_.header().doorbell, patience, observer,
          [&] { return matcher_.progress() || !matcher_.busy() || has_turn() || is_finished(); },
          [] { return -1; });
    } else {
      // Peers send nothing to wait for: sleep at the bell that they do not ring.
      wait_until(
          state_.bell(), patience, observer,
          [&] { return matcher_.busy() || has_turn() || is_finished(); }, [] { return -1; },
          std::chrono::seconds(1));
    }
  }
}

}  // namespace dreamcomm

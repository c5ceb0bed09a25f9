#include "comm/progress_thread.h"

#include <algorithm>
#include <chrono>

#include "core/signals.h"
#include "transport/wait.h"

namespace dreamcomm {
namespace {

class Tending final : public WaitObserver {
 public:
  explicit Tending(const std::function<void()>& tend) : tend_(tend) {}
  void look(int) override { tend_(); }

 private:
  const std::function<void()>& tend_;
};

}  // namespace

ProgressThread::ProgressThread(Member& member, Turnstile& turnstile, Mailbox& mailbox,
                               const std::function<void()>& tend)
    : member_(member), turnstile_(turnstile), mailbox_(mailbox), tend_(tend) {}

void ProgressThread::submit(Job job, const std::shared_ptr<void>& owner) {
  {
    // The turn is taken under the lock, so that turns ascend in the queue.
    std::scoped_lock lock(mutex_);
    if (stopping_) return;  // nobody would run it; its destructor tells its owner
    jobs_.emplace_back(turnstile_.take(), std::move(job));
    start_locked(owner);
  }
  member_.ring_own();
}

void ProgressThread::skip(Turnstile::Turn turn, const std::shared_ptr<void>& owner) {
  {
    std::scoped_lock lock(mutex_);
    if (stopping_) return;  // those behind that turn learn that the rank has left
    const auto later = std::find_if(jobs_.begin(), jobs_.end(),
                                    [&](const auto& job) { return reached(job.first, turn); });
    jobs_.emplace(later, turn, Job{});
    start_locked(owner);
  }
  member_.ring_own();
}

void ProgressThread::start(const std::shared_ptr<void>& owner) {
  {
    std::scoped_lock lock(mutex_);
    start_locked(owner);
  }
  member_.ring_own();
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
  member_.ring_own();
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();  // a callback of the last job ends the group; `owner` lives on
  } else {
    thread.join();
  }
}

bool ProgressThread::has_turn() {
  std::scoped_lock lock(mutex_);
  return !jobs_.empty() && turnstile_.is_up(jobs_.front().first);
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
  turnstile_.pass(turn);
  member_.ring_own();
  return true;
}

void ProgressThread::work() {
  Tending tending(tend_);
  Patience patience(0, 2);
  constexpr int kBusyRounds = 64;
  int busy = 0;
  while (true) {
    while (run_next()) {
    }
    if (is_finished()) return;
    // Where messages keep moving no wait is long, and none of them would tend.
    if (++busy % kBusyRounds == 0) tend_();
    if (mailbox_.busy()) {
      wait_until(
          member_.header().doorbell, patience, tending,
          [&] { return mailbox_.progress() || !mailbox_.busy() || has_turn() || is_finished(); },
          [] { return -1; });
    } else {
      // Nothing to hear from peers: sleep where they do not ring.
      wait_until(
          member_.bell(), patience, tending,
          [&] { return mailbox_.busy() || has_turn() || is_finished(); }, [] { return -1; },
          std::chrono::seconds(1));
    }
  }
}

}  // namespace dreamcomm

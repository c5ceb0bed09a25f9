#include "c10d/work/callback_threads.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace dreamcomm {

struct CallbackThreads::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> tasks;
  std::vector<std::thread> threads;
  std::size_t idle = 0;  // threads that wait for a task
  bool stopped = false;

  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      ++idle;
      wake.wait(lock, [this] { return stopped || !tasks.empty(); });
      --idle;
      if (tasks.empty()) return;
      std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // destroys what it holds without the lock
      lock.lock();
    }
  }
};

CallbackThreads::CallbackThreads() : state_(std::make_shared<State>()) {}

CallbackThreads::~CallbackThreads() { stop(); }

void CallbackThreads::post(std::function<void()> task) {
  std::unique_lock lock(state_->mutex);
  if (state_->stopped) {
    lock.unlock();
    task();
    return;
  }
  state_->tasks.push_back(std::move(task));
  if (state_->idle < state_->tasks.size()) {
    try {
      state_->threads.emplace_back([state = state_] { state->work(); });
    } catch (const std::system_error&) {
      // No thread can be started: an existing one runs it, or this one.
      if (state_->threads.empty()) {
        const std::function<void()> last = std::move(state_->tasks.back());
        state_->tasks.pop_back();
        lock.unlock();
        last();
        return;
      }
    }
  }
  state_->wake.notify_one();
}

void CallbackThreads::stop() {
  std::vector<std::thread> threads;
  {
    std::scoped_lock lock(state_->mutex);
    state_->stopped = true;
    threads.swap(state_->threads);
  }
  state_->wake.notify_all();
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

}  // namespace dreamcomm

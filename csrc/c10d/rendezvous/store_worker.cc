#include "c10d/rendezvous/store_worker.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "core/request.h"
#include "core/signals.h"

namespace dreamcomm {
namespace {

constexpr std::chrono::milliseconds kLeave{200};  // for the thread to end by itself
constexpr std::chrono::seconds kLeaveOfPython{10};
constexpr int kPatienceForAnswers = 4;  // one may take three times as long as another

/// Stores written in Python may lack it.
c10::intrusive_ptr<c10d::Store> clone_of(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;
  }
}

/// Others may be written in Python, also where they can be cloned.
bool is_of_torch(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store);
  const auto root = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
  const c10d::Store* one = root.get();
  return dynamic_cast<const c10d::TCPStore*>(one) || dynamic_cast<const c10d::FileStore*>(one) ||
         dynamic_cast<const c10d::HashStore*>(one);
}

StoreWorker::Job setting(const std::string& key, const std::string& text) {
  return [key, text](c10d::Store& store) {
    store.set(key, text);
    return std::string();
  };
}

}  // namespace

struct StoreWorker::State {
  struct Order {
    Job job;
    std::optional<std::string> result{};
    bool over = false;
    bool in_vain = false;  // a caller waited for it until its patience ended
  };

  void work() {
    std::unique_lock lock(mutex);
    c10::intrusive_ptr<c10d::Store> own;
    while (await_order(lock)) {
      const std::shared_ptr<Order> order = orders.front();
      lock.unlock();
      if (!own) own = clone_of(store);
      try {
        order->result = order->job(*own);
      } catch (const std::exception&) {  // the rank that served the store has ended
      }
      lock.lock();
      order->over = true;
      if (order->in_vain) --silent;
      orders.pop_front();
      changed.notify_all();
    }
    lock.unlock();
    own.reset();
    store.reset();
    lock.lock();
    has_ended = true;
    changed.notify_all();
  }

  /// Waits for the next order; false if there will be none.
  bool await_order(std::unique_lock<std::mutex>& lock) {
    while (true) {
      const Clock::time_point now = Clock::now();
      while (!later.empty() && later.begin()->first <= now) {
        orders.push_back(later.extract(later.begin()).mapped());
      }
      if (!orders.empty()) return true;
      if (ending) return false;
      if (later.empty()) {
        changed.wait(lock);
      } else {
        changed.wait_until(lock, later.begin()->first);
      }
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  c10::intrusive_ptr<c10d::Store> store;  // as given; the thread's once it is there
  std::deque<std::shared_ptr<Order>> orders;
  std::multimap<Clock::time_point, std::shared_ptr<Order>> later;  // not yet due
  std::chrono::milliseconds took{0};                               // the last answer
  std::chrono::milliseconds patience = kPatience;
  bool may_be_python = false;  // where the thread works
  int silent = 0;              // orders whose callers stopped waiting and that still run
  bool ending = false;
  bool has_ended = true;  // there is no thread
};

StoreWorker::StoreWorker(c10::intrusive_ptr<c10d::Store> store)
    : state_(std::make_shared<State>()) {
  state_->may_be_python = !is_of_torch(store);
  state_->store = std::move(store);
}

StoreWorker::~StoreWorker() { leave(); }

void StoreWorker::leave() {
  std::unique_lock lock(state_->mutex);
  state_->ending = true;
  state_->changed.notify_all();
  const auto has_ended = [this] { return state_->has_ended; };
  if (state_->changed.wait_for(lock, kLeave, has_ended) || !state_->may_be_python) return;
  state_->changed.wait_for(lock, kLeaveOfPython, has_ended);
}

/// Under the lock. If no thread can be started, the store counts as a store that does not answer.
bool StoreWorker::hire() {
  try {
    std::thread([state = state_] {
      block_signals();
      state->work();
    }).detach();
  } catch (const std::system_error&) {
    return false;
  }
  state_->has_ended = false;
  return true;
}

void StoreWorker::begin(Job job, std::chrono::milliseconds pause) {
  const std::scoped_lock lock(state_->mutex);
  if (state_->ending || (state_->has_ended && !hire())) return;
  const auto order = std::make_shared<State::Order>(State::Order{std::move(job)});
  if (pause.count() > 0) {
    state_->later.emplace(Clock::now() + pause, order);
  } else {
    state_->orders.push_back(order);
  }
  state_->changed.notify_all();
}

StoreWorker::Job StoreWorker::looking(const std::string& key) const {
  return [key, state = state_.get()](c10d::Store& store) {
    const Clock::time_point begin = Clock::now();
    std::string found = store.check({key}) ? store.get_to_str(key) : std::string();
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
    const std::scoped_lock lock(state->mutex);
    const auto quicker = std::min(std::exchange(state->took, took), took);
    state->patience = std::clamp(kPatienceForAnswers * quicker, kPatience, kLongestPatience);
    return found;
  };
}

std::optional<std::string> StoreWorker::read(const std::string& key) {
  {
    const std::scoped_lock lock(state_->mutex);
    if (state_->silent > 0) return std::nullopt;  // no caller would take the answer
  }
  return run(looking(key), patience());
}

std::chrono::milliseconds StoreWorker::patience() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->patience;
}

void StoreWorker::greet() {
  begin(looking("greeting"));
  begin(looking("greeting"));
}

void StoreWorker::post(const std::string& key, const std::string& text) {
  begin(setting(key, text));
}

void StoreWorker::set(const std::string& key, const std::string& text) {
  run(setting(key, text), kPatience);
}

std::optional<std::string> StoreWorker::run(Job job, std::chrono::milliseconds patience) {
  const auto order = std::make_shared<State::Order>(State::Order{std::move(job)});
  std::unique_lock lock(state_->mutex);
  if (state_->ending) return std::nullopt;
  if (state_->has_ended && !hire()) return std::nullopt;
  state_->orders.push_back(order);
  state_->changed.notify_all();
  if (state_->silent > 0) return std::nullopt;
  if (!state_->changed.wait_for(lock, patience, [&] { return order->over; })) {
    order->in_vain = true;
    ++state_->silent;
    return std::nullopt;
  }
  return std::move(order->result);
}

}  // namespace dreamcomm

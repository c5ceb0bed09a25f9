#include "c10d/rendezvous/deadline_store.h"

#include <algorithm>

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

milliseconds left_until(Clock::time_point until) {
  constexpr milliseconds kLeast{1};
  return std::max(std::chrono::duration_cast<milliseconds>(until - Clock::now()), kLeast);
}

}  // namespace

DeadlineStore::DeadlineStore(StorePtr store, Clock::time_point until, Watch watch)
    : DeadlineStore(std::move(store), until, std::move(watch), std::make_shared<Mark>()) {}

DeadlineStore::DeadlineStore(StorePtr store, Clock::time_point until, Watch watch,
                             std::shared_ptr<Mark> left)
    : store_(std::move(store)), until_(until), watch_(std::move(watch)), left_(std::move(left)) {
  timeout_ = left_until(until_);
}

std::string DeadlineStore::trouble() {
  std::string words = watch_();
  if (!words.empty()) leave();
  return words;
}

c10::intrusive_ptr<c10d::Store> DeadlineStore::clone() {
  return c10::intrusive_ptr<DeadlineStore>::unsafe_steal_from_new(
      new DeadlineStore(store_->clone(), until_, watch_, left_));
}

std::vector<std::uint8_t> DeadlineStore::get(const std::string& key) {
  wait({key});
  return store_->get(key);
}

std::vector<std::vector<std::uint8_t>> DeadlineStore::multiGet(
    const std::vector<std::string>& keys) {
  wait(keys);
  return store_->multiGet(keys);
}

void DeadlineStore::wait(const std::vector<std::string>& keys) {
  await_keys(*store_, keys, [&] {
    TORCH_CHECK_WITH(DistStoreError, left_->read() == 0, "nobody waits for ", keys.front(),
                     " any longer");
    TORCH_CHECK_WITH(DistStoreError, Clock::now() < until_, "an address has not come within ",
                     timeout_.count(), " ms (", keys.front(), ")");
  });
}

}  // namespace dreamcomm

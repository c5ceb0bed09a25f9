#include "c10d/rendezvous/torch_store.h"

#include <algorithm>
#include <thread>

#include "c10d/base/gil_signals.h"
#include "core/error.h"
#include "core/request.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// Pauses between looks at the store: short at first, as the others are mostly quick.
constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{50};

}  // namespace

void await_keys(c10d::Store& store, const std::vector<std::string>& keys,
                const std::function<void()>& meanwhile) {
  milliseconds pause = kFirstPause;
  while (!store.check(keys)) {
    meanwhile();
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

void TorchStore::set(const std::string& key, const std::string& value) { store_->set(key, value); }

bool TorchStore::has(const std::string& key) { return store_->check({key}); }

// Not store_->wait(): it cannot be interrupted, and a TCPStore's prints warnings at its timeout.
std::string TorchStore::get(const std::string& key, milliseconds timeout) {
  const Clock::time_point deadline = deadline_in(Clock::now(), timeout);
  await_keys(*store_, {key}, [&] {
    check_signals();
    check(Clock::now() < deadline, ErrorKind::kTimeout, "key '", key,
          "' did not appear in the store within the ", timeout.count(), " ms left");
  });
  return store_->get_to_str(key);
}

}  // namespace dreamcomm

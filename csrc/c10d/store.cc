#include "c10d/store.h"

#include <algorithm>
#include <thread>

#include "c10d/python.h"
#include "core/error.h"
#include "core/request.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

/// Pauses between looks at the store: short at first, as the others are mostly near.
constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{50};

}  // namespace

void TorchStore::set(const std::string& key, const std::string& value) { store_->set(key, value); }

bool TorchStore::has(const std::string& key) { return store_->check({key}); }

// Not store_->wait(): that one cannot be interrupted, and a TCPStore's prints
// warnings when its time is up.
std::string TorchStore::get(const std::string& key, milliseconds timeout) {
  const Clock::time_point deadline = deadline_in(Clock::now(), timeout);
  milliseconds pause = kFirstPause;
  while (!has(key)) {
    check(Clock::now() < deadline, ErrorKind::kTimeout, "key '", key,
          "' did not appear in the store within the ", timeout.count(), " ms left");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
    check_signals();
  }
  return store_->get_to_str(key);
}

}  // namespace dreamcomm

#include "c10d/store.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "c10d/python.h"
#include "core/error.h"

namespace dreamcomm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Whether the key appeared within `slice`. Stores tell a timeout by exceptions
/// of several types that they also use for other failures, so time decides.
bool wait_for(c10d::Store& store, const std::string& key, milliseconds slice) {
  const Clock::time_point begin = Clock::now();
  try {
    store.wait({key}, slice);
    return true;
  } catch (const c10::Error&) {
    if (Clock::now() - begin < slice / 2) throw;
    return false;
  }
}

}  // namespace

void TorchStore::set(const std::string& key, const std::string& value) { store_->set(key, value); }

std::string TorchStore::get(const std::string& key, milliseconds timeout) {
  const Clock::time_point begin = Clock::now();
  while (true) {
    const auto spent = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
    check(spent < timeout, ErrorKind::kTimeout, "key '", key, "' did not appear in the store in ",
          timeout.count(), " ms");
    const milliseconds slice = std::clamp(timeout - spent, milliseconds(10), milliseconds(1000));
    if (wait_for(*store_, key, slice)) return store_->get_to_str(key);
    check_signals();
  }
}

}  // namespace dreamcomm

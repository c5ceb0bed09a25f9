// The rendezvous the transport asks for, over the store torch hands to a backend.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "c10d/base/store_ptr.h"
#include "core/store.h"

namespace dreamcomm {

/// Returns once the store has the keys. Polls, as a thread that waits in a TCPStore holds its lock
/// against the rest of the process. `meanwhile` is called before each pause; it ends the wait by
/// throwing.
void await_keys(c10d::Store& store, const std::vector<std::string>& keys,
                const std::function<void()>& meanwhile);

class TorchStore final : public Store {
 public:
  explicit TorchStore(StorePtr store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override;
  bool has(const std::string& key) override;
  /// Lets Python handle signals (Ctrl-C) while it waits.
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override;

 private:
  StorePtr store_;
};

}  // namespace dreamcomm

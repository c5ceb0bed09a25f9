// The rendezvous the transport asks for, over the store torch hands to a backend.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "core/store.h"

namespace dreamcomm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Returns once the store has the keys. Looks and sleeps, as a TCPStore is its process's no longer
/// while one waits in it; `meanwhile` is called before each pause, and ends the wait by throwing.
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

// The rendezvous the transport asks for, over the store torch hands to a backend.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/store.h"

namespace dreamcomm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

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

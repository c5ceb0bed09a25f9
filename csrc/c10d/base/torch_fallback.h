// Torch's own backends, Gloo and NCCL, which serve what this one does not.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace dreamcomm {

/// Inner backends by device type ("cpu": Gloo, "cuda": NCCL), each made at its first use.
/// Thread-safe.
class Fallback {
 public:
  using Inner = c10::intrusive_ptr<c10d::Backend>;
  /// Makes the inner backend of a device type or throws why there is none.
  using Factory = std::function<Inner(const std::string& device_type)>;

  explicit Fallback(Factory factory) : factory_(std::move(factory)) {}

  /// Throws c10::DistBackendError after close().
  Inner get(const std::string& device_type);
  /// Uses `inner` for that type from now on; the factory is not asked.
  void set(const std::string& device_type, Inner inner);
  /// Those made so far.
  std::vector<Inner> all() const;
  /// Drops the factory and the inner backends and returns these.
  std::vector<Inner> close();

 private:
  mutable std::mutex mutex_;
  std::mutex making_;  // held while the factory runs, as mutex_ is not
  Factory factory_;
  std::map<std::string, Inner> made_;
  bool closed_ = false;
};

/// Sets a backend's timeout; torch 2.11's have none to set.
void set_timeout_of(c10d::Backend& inner, std::chrono::milliseconds timeout);

}  // namespace dreamcomm

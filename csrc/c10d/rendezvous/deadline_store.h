// The store through which torch's Gloo exchanges addresses, with a deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10d/rendezvous/torch_store.h"
#include "core/flag.h"
#include "core/request.h"

namespace dreamcomm {

/// Waits for keys until a deadline; its timeout is the time left when it was made.
class DeadlineStore final : public c10d::Store {
 public:
  /// Why the awaited keys will not appear, in words, or "".
  using Watch = std::function<std::string()>;

  DeadlineStore(StorePtr store, Clock::time_point until, Watch watch);

  /// The watch's text. Once it is not empty, all waits end; any thread.
  std::string trouble();
  /// Ends all waits, now and later; any thread.
  void leave() { left_->publish(1); }

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    store_->set(key, value);
  }
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return store_->add(key, value);
  }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return store_->check(keys); }
  std::int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& /*timeout*/) override {
    wait(keys);
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override {
    store_->append(key, value);
  }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override {
    store_->multiSet(keys, values);
  }

 private:
  DeadlineStore(StorePtr store, Clock::time_point until, Watch watch, std::shared_ptr<Mark> left);

  const StorePtr store_;
  const Clock::time_point until_;
  const Watch watch_;
  const std::shared_ptr<Mark> left_;  // its clones', too
};

}  // namespace dreamcomm

// A key-value store that all ranks can reach: they use it before they share memory.
#pragma once

#include <chrono>
#include <string>

namespace dreamcomm {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual bool has(const std::string& key) = 0;
  /// Blocks until the key exists; throws Error(kTimeout) after `timeout`.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
};

}  // namespace dreamcomm

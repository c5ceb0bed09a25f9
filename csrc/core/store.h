// Where ranks meet before they share memory: a key-value store all can reach.
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

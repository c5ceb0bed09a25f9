// A folder whose files a process maps as regions.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <utility>

namespace dreamcomm {

/// Counts what regions do with their files. Each region holds a shared pointer to it.
class RegionFolder {
 public:
  explicit RegionFolder(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  /// Bytes of the files that this process maps now.
  std::size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  /// Bytes of all ranges that were dropped, each time.
  std::size_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

  void note_mapped(std::size_t bytes) { bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  void note_unmapped(std::size_t bytes) { bytes_.fetch_sub(bytes, std::memory_order_relaxed); }
  void note_dropped(std::size_t bytes) { dropped_.fetch_add(bytes, std::memory_order_relaxed); }

 private:
  const std::string path_;
  std::atomic<std::size_t> bytes_{0};
  std::atomic<std::size_t> dropped_{0};
};

}  // namespace dreamcomm

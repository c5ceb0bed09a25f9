// The memory of one process that its peers map, for tensors that collectives read
// and write in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "core/free_ranges.h"
#include "transport/os/memfd.h"
#include "transport/os/nonce.h"

namespace dreamcomm {

/// One range of a memfd, reserved at once and filled with pages as they are
/// allocated. Peers map it whole, so a tensor anywhere in it is known to them by
/// its offset. Freed memory stays and is used again: the first touch of a page
/// costs more than all later ones. Thread-safe.
class Heap : public std::enable_shared_from_this<Heap> {
 public:
  /// Throws Error(kSystem) if the system gives no range of that size.
  static std::shared_ptr<Heap> make(std::size_t bytes);
  /// Half of the machine's memory: no more than the pages in use is ever taken.
  static std::size_t default_bytes();

  /// Returns `bytes` of memory, aligned to kAlign, of undefined content, or null if the heap is
  /// full. The last owner frees it; it keeps the heap alive.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  static constexpr std::size_t kAlign = 128;
  /// Keeps the allocation around `at` from being reused after it is freed: a peer may still write
  /// there. It ends with the heap.
  void retire(const std::byte* at);

  bool holds(const std::byte* at) const { return at >= data() && at < data() + bytes(); }
  std::byte* data() const { return memory_.data(); }
  std::size_t bytes() const { return memory_.bytes(); }
  std::size_t bytes_in_use() const;
  /// "3 of 8192 MiB in use", and how many requests found it full.
  std::string describe() const;
  const Fd& fd() const { return fd_; }
  const Nonce& id() const { return id_; }

  /// Maps a peer's heap, once for all groups.
  std::shared_ptr<const Mapping> map_peer(const Nonce& id, const Fd& fd, std::size_t bytes);

 private:
  explicit Heap(std::size_t bytes);
  std::optional<std::size_t> take(std::size_t bytes);
  bool commit(std::size_t end);
  void give_back(std::size_t offset, std::size_t bytes);

  Nonce id_ = make_nonce();
  Fd fd_;
  Mapping memory_;
  mutable std::mutex mutex_;
  FreeRanges free_;
  std::set<std::size_t> retired_;  // an offset in each piece that is not to be given out again
  std::size_t committed_ = 0;      // pages below it are the heap's
  std::size_t in_use_ = 0;
  std::size_t refused_ = 0;
  std::map<Nonce, std::weak_ptr<const Mapping>> peers_;
};

}  // namespace dreamcomm

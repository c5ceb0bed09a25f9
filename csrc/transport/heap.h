// Memory for tensors that take part in collectives: pages of a memfd that stay
// mapped and are used again, as the first touch of a page is what costs.
#pragma once

#include <cstddef>
#include <memory>

namespace dreamcomm {

/// A pool of memfd blocks. Thread-safe.
class Heap {
 public:
  Heap();

  /// `bytes` of memory, aligned to a page, of undefined content. It goes back to
  /// the pool with its last owner, which may outlive the heap. Never null.
  /// Throws Error(kSystem) if the system has no more.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);

  /// Gives the blocks nobody uses back to the system.
  void trim();

  std::size_t bytes_in_use() const;
  std::size_t bytes_kept() const;  // mapped, free to be used again

 private:
  class Pool;
  std::shared_ptr<Pool> pool_;
};

}  // namespace dreamcomm

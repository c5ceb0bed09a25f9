#include "transport/heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <utility>

#include "transport/memfd.h"

namespace dreamcomm {
namespace {

constexpr std::size_t kPage = 4096;

/// Sizes come in eighths of a power of two, so that a freed block fits the next
/// request of about its size: at most an eighth of it is wasted.
std::size_t round_up(std::size_t bytes) {
  const std::size_t step = std::max(kPage, std::bit_floor(std::max<std::size_t>(bytes, 1)) / 8);
  return (std::max<std::size_t>(bytes, 1) + step - 1) / step * step;
}

struct Piece {
  explicit Piece(std::size_t bytes)
      : fd(create_memfd("dreamcomm-heap", bytes)), mapping(fd, bytes) {
    // Unlike a window this is the user's own memory: a forked child may read it.
    madvise(mapping.data(), bytes, MADV_DOFORK);
  }
  Fd fd;  // kept so that peers can be handed the same memory
  Mapping mapping;
};

}  // namespace

class Heap::Pool : public std::enable_shared_from_this<Heap::Pool> {
 public:
  std::shared_ptr<std::byte> take(std::size_t bytes) {
    const std::size_t rounded = round_up(bytes);
    std::unique_ptr<Piece> piece = reuse(rounded);
    if (!piece) piece = std::make_unique<Piece>(rounded);
    {
      std::scoped_lock lock(mutex_);
      in_use_ += rounded;
    }
    std::byte* data = piece->mapping.data();
    auto give_back = [pool = shared_from_this(), kept = piece.release()](std::byte*) {
      pool->put(std::unique_ptr<Piece>(kept));
    };
    return {data, std::move(give_back)};
  }

  void trim() {
    std::multimap<std::size_t, std::unique_ptr<Piece>> dropped;  // unmapped without the lock
    std::scoped_lock lock(mutex_);
    dropped.swap(free_);
    kept_ = 0;
  }

  std::size_t in_use() const {
    std::scoped_lock lock(mutex_);
    return in_use_;
  }

  std::size_t kept() const {
    std::scoped_lock lock(mutex_);
    return kept_;
  }

 private:
  std::unique_ptr<Piece> reuse(std::size_t bytes) {
    std::scoped_lock lock(mutex_);
    const auto found = free_.find(bytes);
    if (found == free_.end()) return nullptr;
    std::unique_ptr<Piece> piece = std::move(found->second);
    free_.erase(found);
    kept_ -= bytes;
    return piece;
  }

  void put(std::unique_ptr<Piece> piece) {
    const std::size_t bytes = piece->mapping.bytes();
    std::scoped_lock lock(mutex_);
    in_use_ -= bytes;
    kept_ += bytes;
    free_.emplace(bytes, std::move(piece));
  }

  mutable std::mutex mutex_;
  std::multimap<std::size_t, std::unique_ptr<Piece>> free_;
  std::size_t in_use_ = 0;
  std::size_t kept_ = 0;
};

Heap::Heap() : pool_(std::make_shared<Pool>()) {}

std::shared_ptr<std::byte> Heap::allocate(std::size_t bytes) { return pool_->take(bytes); }
void Heap::trim() { pool_->trim(); }
std::size_t Heap::bytes_in_use() const { return pool_->in_use(); }
std::size_t Heap::bytes_kept() const { return pool_->kept(); }

}  // namespace dreamcomm

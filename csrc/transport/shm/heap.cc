#include "transport/shm/heap.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "core/error.h"
#include "core/round_up.h"

namespace dreamcomm {
namespace {

constexpr std::size_t kPage = 4096;
/// Pages are asked for in steps of this, as each request is a system call.
constexpr std::size_t kStep = std::size_t{1} << 20;

}  // namespace

std::shared_ptr<Heap> Heap::make(std::size_t bytes) {
  check(bytes > 0, ErrorKind::kInvalid, "a heap of no bytes");
  return std::shared_ptr<Heap>(new Heap(round_up(bytes, kPage)));
}

std::size_t Heap::default_bytes() {
  const auto pages = static_cast<std::size_t>(std::max(sysconf(_SC_PHYS_PAGES), 1L));
  return std::max(pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) / 2, kStep);
}

Heap::Heap(std::size_t bytes)
    // Unlike a window this is the user's own memory: a forked child may use it.
    : fd_(create_memfd("dreamcomm-heap", bytes)),
      memory_(fd_, bytes, {.in_children = true}),
      free_(bytes) {}

std::shared_ptr<std::byte> Heap::allocate(std::size_t bytes) {
  if (bytes > memory_.bytes()) {  // so large that rounding up might wrap around
    const std::scoped_lock lock(mutex_);
    ++refused_;
    return nullptr;
  }
  const std::size_t rounded = round_up(std::max<std::size_t>(bytes, 1), kAlign);
  const std::optional<std::size_t> offset = take(rounded);
  if (!offset) return nullptr;
  auto give = [heap = shared_from_this(), at = *offset, rounded](std::byte*) {
    heap->give_back(at, rounded);
  };
  return {memory_.data() + *offset, std::move(give)};
}

std::optional<std::size_t> Heap::take(std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  const std::optional<std::size_t> offset = free_.take(bytes);
  if (offset && commit(*offset + bytes)) {
    in_use_ += bytes;
    return offset;
  }
  if (offset) free_.give_back(*offset, bytes);
  ++refused_;
  return std::nullopt;
}

/// Makes the kernel provide the pages up to `end` now: later it could only kill the process.
bool Heap::commit(std::size_t end) {
  if (end <= committed_) return true;
  const std::size_t target = std::min(round_up(end, kStep), memory_.bytes());
  const auto begin = static_cast<off_t>(committed_);
  if (fallocate(fd_.get(), 0, begin, static_cast<off_t>(target) - begin) != 0) return false;
  committed_ = target;
  return true;
}

void Heap::give_back(std::size_t offset, std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  const auto retired = retired_.lower_bound(offset);
  if (retired != retired_.end() && *retired < offset + bytes) return;
  in_use_ -= bytes;
  free_.give_back(offset, bytes);
}

void Heap::retire(const std::byte* at) {
  const std::scoped_lock lock(mutex_);
  if (holds(at)) retired_.insert(static_cast<std::size_t>(at - data()));
}

std::size_t Heap::bytes_in_use() const {
  const std::scoped_lock lock(mutex_);
  return in_use_;
}

std::string Heap::describe() const {
  const std::scoped_lock lock(mutex_);
  constexpr int kMiB = 20;
  const std::string full =
      refused_ == 0 ? "" : concat(", ", refused_, " requests found it full and got other memory");
  return concat(in_use_ >> kMiB, " of ", bytes() >> kMiB, " MiB in use", full);
}

std::shared_ptr<const Mapping> Heap::map_peer(const Nonce& id, const Fd& fd, std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(peers_, [](const auto& peer) { return peer.second.expired(); });
  if (const auto found = peers_.find(id); found != peers_.end()) return found->second.lock();
  auto mapping = std::make_shared<const Mapping>(fd, bytes);
  peers_[id] = mapping;
  return mapping;
}

}  // namespace dreamcomm

#include "transport/shm/region.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <optional>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/round_up.h"
#include "core/signals.h"
#include "transport/os/unnamed_file.h"

namespace dreamcomm {
namespace {

using std::chrono::steady_clock;

constexpr const char* kRegionPrefix = "dreamcomm-region-";
constexpr int kRegionQueue = 4096;  // the kernel takes its own limit if that is less

constexpr std::size_t kRegionUnit = 4096;

/// The size of the memfd or file: an empty region has memory, too.
std::size_t mapped_bytes(std::size_t bytes) {
  check(bytes <= SIZE_MAX / 2, ErrorKind::kInvalid, "expected less than 2^63 bytes, got ", bytes);
  return round_up(std::max<std::size_t>(bytes, 1), kRegionUnit);
}

Fd create_region(std::size_t bytes, const RegionFolderPtr& folder) {
  if (folder == nullptr) return create_memfd("dreamcomm-region", mapped_bytes(bytes));
  return create_unnamed_file(folder->path(), mapped_bytes(bytes));
}

/// The descriptor that a region of a file keeps.
Fd kept_descriptor(const Fd& fd, const RegionFolderPtr& folder) {
  if (folder == nullptr) return {};
  Fd kept(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  check(static_cast<bool>(kept), ErrorKind::kSystem, "cannot keep the descriptor of a file in '",
        folder->path(), "': ", std::generic_category().message(errno),
        errno == EMFILE ? " (raise the limit: ulimit -n)" : "");
  return kept;
}

/// Whole pages of a region.
struct PageRange {
  std::size_t begin;
  std::size_t bytes;
};

PageRange pages_of(const Region& region, std::size_t offset, std::size_t bytes) {
  check(offset <= region.bytes() && bytes <= region.bytes() - offset, ErrorKind::kInvalid,
        "expected a part of the ", region.bytes(), " bytes of a region, got ", bytes,
        " bytes from ", offset, " on");
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t begin = offset / page * page;
  return {begin, std::min(round_up(offset + bytes, page), mapped_bytes(region.bytes())) - begin};
}

/// This process reads the pages again, and keeps none of them.
void unmap_pages(const Mapping& mapping, const PageRange& pages) {
  if (mapping.data() == nullptr) return;
  check(madvise(mapping.data() + pages.begin, pages.bytes, MADV_DONTNEED) == 0, ErrorKind::kSystem,
        "madvise(MADV_DONTNEED) of ", pages.bytes,
        " bytes failed: ", std::generic_category().message(errno));
}

Fd region_stop_event() {
  Fd fd(eventfd(0, EFD_CLOEXEC));
  check(static_cast<bool>(fd), ErrorKind::kSystem,
        "eventfd failed: ", std::generic_category().message(errno));
  return fd;
}

}  // namespace

Region::Region(const Fd& fd, std::size_t bytes, bool protects, RegionFolderPtr folder)
    : bytes_(bytes),
      protects_(protects),
      folder_(std::move(folder)),
      fd_(kept_descriptor(fd, folder_)),
      memory_(fd, mapped_bytes(bytes), {.in_children = true}),
      read_only_(protects
                     ? Mapping(fd, mapped_bytes(bytes), {.writable = false, .in_children = true})
                     : Mapping()) {
  if (folder_ != nullptr) folder_->note_mapped(mapped_bytes(bytes_));
}

Region::~Region() {
  if (folder_ != nullptr) folder_->note_unmapped(mapped_bytes(bytes_));
}

void Region::allow_writes(bool allowed) const {
  if (protects_) read_only_.allow_writes(allowed);
}

void Region::allow_rows(bool allowed) const {
  if (protects_) memory_.allow_writes(allowed);
}

void Region::start_writing(std::size_t offset, std::size_t bytes) const {
  const PageRange pages = pages_of(*this, offset, bytes);
  if (folder_ == nullptr || bytes == 0) return;
  dreamcomm::start_writing(fd_, pages.begin, pages.bytes);
}

void Region::drop(std::size_t offset, std::size_t bytes) const {
  const PageRange pages = pages_of(*this, offset, bytes);
  if (folder_ == nullptr || bytes == 0) return;
  unmap_pages(memory_, pages);
  unmap_pages(read_only_, pages);
  drop_pages(fd_, pages.begin, pages.bytes);
  folder_->note_dropped(pages.bytes);
}

void Region::start_reading(std::size_t offset, std::size_t bytes) const {
  const PageRange pages = pages_of(*this, offset, bytes);
  if (folder_ == nullptr || bytes == 0) return;
  dreamcomm::start_reading(fd_, pages.begin, pages.bytes);
}

std::shared_ptr<Region> make_own_region(std::size_t bytes, const RegionFolderPtr& folder) {
  return std::make_shared<Region>(create_region(bytes, folder), bytes, /*protects=*/false, folder);
}

RegionOffer::RegionOffer(std::size_t bytes, bool protects, RegionFolderPtr folder)
    : process_(getpid()),
      address_(kRegionPrefix + hex(nonce_)),
      memory_(create_region(bytes, folder)),
      region_(std::make_shared<Region>(memory_, bytes, protects, std::move(folder))),
      listener_(listen_at(address_, kRegionQueue)),
      stop_(region_stop_event()) {
  try {
    thread_ = std::thread([this] {
      block_signals();
      work();
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kSystem, concat("cannot start a thread: ", error.what()));
  }
}

void RegionOffer::close() {
  if (!thread_.joinable()) return;
  if (process_ == getpid()) {
    eventfd_write(stop_.get(), 1);
    thread_.join();
  } else {
    // A forked child has no such thread to join; what is left of it must not be destroyed either.
    static_cast<void>(new std::thread(std::move(thread_)));
  }
  memory_ = Fd();
  listener_ = Fd();
}

void RegionOffer::work() const {
  constexpr std::chrono::milliseconds kRetry{100};
  std::array<pollfd, 2> polled{{{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}}};
  while (true) {
    if (poll(polled.data(), polled.size(), -1) < 0) continue;  // interrupted
    if (polled[0].revents != 0) return;
    try {
      serve();
    } catch (const Error&) {  // too few descriptors, for one: the other process waits meanwhile
      if (readable(stop_, steady_clock::now() + kRetry)) return;
    }
  }
}

void RegionOffer::serve() const {
  const std::optional<Fd> socket = accept_from(listener_, steady_clock::now());
  if (!socket || !is_own_user(peer_process(*socket))) return;
  send_with_fd(*socket, nonce_.data(), nonce_.size(), memory_);
}

std::shared_ptr<Region> take_region(const std::string& address, std::size_t bytes, bool protects,
                                    SocketDeadline deadline, RegionFolderPtr folder) {
  const std::optional<Fd> socket = connect_to(address);
  check(socket.has_value(), ErrorKind::kSystem, "no process of this host offers memory at '",
        address, "': the rank that did has ended, or runs in another network namespace; run the ",
        "ranks of a host in one container");
  const PeerProcess peer = peer_process(*socket);
  check(is_own_user(peer), ErrorKind::kSystem, "process ", peer.pid, " offers memory at '", address,
        "' as user ", peer.uid, ", and this rank runs as user ", geteuid(),
        ": run the ranks of a host as one user");
  Nonce nonce{};
  Fd memory;
  check(receive_with_fd(*socket, nonce.data(), nonce.size(), memory, deadline), ErrorKind::kSystem,
        "process ", peer.pid, " offers memory at '", address,
        "' and has sent none: it has ended, is out of descriptors (ulimit -n), or is stopped");
  check(kRegionPrefix + hex(nonce) == address, ErrorKind::kSystem, "process ", peer.pid,
        " has sent other memory than that of '", address, "': a rank runs another dreamcomm");
  const bool is_expected = folder == nullptr ? is_sealed_memfd(memory, mapped_bytes(bytes))
                                             : is_unnamed_file(memory, mapped_bytes(bytes));
  check(is_expected, ErrorKind::kSystem, "process ", peer.pid, " offers other memory at '", address,
        "' than the ", bytes,
        " bytes that are expected here: all ranks of a host have to shard the same parameters");
  return std::make_shared<Region>(memory, bytes, protects, std::move(folder));
}

}  // namespace dreamcomm

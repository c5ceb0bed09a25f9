// Memory that all ranks of a host map: one copy of something that each of them reads.
//
//   lowest rank:  RegionOffer ---- descriptor, over a socket ----> take_region(): other ranks
//                      |                                                |
//                   Region (writable; read-only)                     Region
//
// The memory is a memfd, or the pages of an unnamed file, which the disk holds while none needs
// them.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <thread>

#include "transport/os/memfd.h"
#include "transport/os/nonce.h"
#include "transport/os/unix_socket.h"
#include "transport/shm/region_folder.h"

namespace dreamcomm {

/// Where a region lies: in a file of that folder, or in a memfd if there is none.
using RegionFolderPtr = std::shared_ptr<RegionFolder>;

/// A process's mapping of a sealed memfd, or of an unnamed file. A forked child sees it, too. The
/// descriptor of a file is kept. Each user of the memory holds a shared pointer to it.
class Region {
 public:
  /// Maps `bytes` of the descriptor, and at least a page. With `protects` it maps them twice, the
  /// second time read-only. Throws NoSharedMemory, or Error(kSystem).
  Region(const Fd& fd, std::size_t bytes, bool protects, RegionFolderPtr folder = nullptr);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  /// Writable, unless allow_rows() has forbidden it.
  std::byte* data() const { return memory_.data(); }
  /// The same memory as its readers get it: a stray write to it faults if the region protects.
  std::byte* whole() const { return protects_ ? read_only_.data() : memory_.data(); }
  std::size_t bytes() const { return bytes_; }
  bool protects() const { return protects_; }
  // Both change this process's mappings alone, and nothing if the region does not protect.
  /// Lets writes to whole() succeed, until they are forbidden again.
  void allow_writes(bool allowed) const;
  /// Lets writes to data() fault, by which a rank steps its rows, until they are allowed again.
  void allow_rows(bool allowed) const;

  /// The folder of its file; null: it is memory.
  const RegionFolderPtr& folder() const { return folder_; }
  // Parts of a file: all pages that `bytes` from `offset` on touch. Nothing is done to memory, and
  // values stay. Each throws Error(kSystem), as where the disk has failed.
  /// Begins to write what has changed.
  void start_writing(std::size_t offset, std::size_t bytes) const;
  /// Frees the pages: those that another process maps are freed when it drops them.
  void drop(std::size_t offset, std::size_t bytes) const;
  /// Begins to read.
  void start_reading(std::size_t offset, std::size_t bytes) const;

 private:
  const std::size_t bytes_;
  const bool protects_;
  const RegionFolderPtr folder_;
  const Fd fd_;
  const Mapping memory_;
  const Mapping read_only_;
};

/// Makes a region, and gives it to all processes of the same user that know its address, until it
/// is closed.
class RegionOffer {
 public:
  /// A page is the system's until a rank touches it: so each rank's rows lie near its processor.
  /// Throws NoSharedMemory, or Error(kSystem).
  RegionOffer(std::size_t bytes, bool protects, RegionFolderPtr folder = nullptr);
  ~RegionOffer() { close(); }
  RegionOffer(const RegionOffer&) = delete;
  RegionOffer& operator=(const RegionOffer&) = delete;

  /// A name that cannot be guessed, of this host.
  const std::string& address() const { return address_; }
  const std::shared_ptr<Region>& region() const { return region_; }
  /// Gives it to no further process. In a forked child nothing is given, and the parent goes on.
  void close();

 private:
  void work() const;
  void serve() const;

  const pid_t process_;
  const Nonce nonce_ = make_nonce();
  const std::string address_;
  Fd memory_;
  std::shared_ptr<Region> region_;
  Fd listener_;
  Fd stop_;  // becomes readable when the thread is to end
  std::thread thread_;
};

/// Maps the region that another process of this host offers: `bytes` and `protects` as there, and
/// a folder if it has one. Throws Error(kSystem).
std::shared_ptr<Region> take_region(const std::string& address, std::size_t bytes, bool protects,
                                    SocketDeadline deadline, RegionFolderPtr folder = nullptr);

/// A region that no other process maps, in a file of the folder. Throws Error(kSystem).
std::shared_ptr<Region> make_own_region(std::size_t bytes, const RegionFolderPtr& folder);

}  // namespace dreamcomm

// Memory that all ranks of a host map: one copy of something that each of them reads.
//
//   lowest rank:  RegionOffer ---- descriptor, over a socket ----> take_region(): other ranks
//                      |                                                |
//                   Region (writable; read-only)                     Region
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <thread>

#include "transport/os/memfd.h"
#include "transport/os/nonce.h"
#include "transport/os/unix_socket.h"

namespace dreamcomm {

/// A process's mapping of a sealed memfd. A forked child sees it, too, and no descriptor is kept.
/// Each user of the memory holds a shared pointer to it.
class Region {
 public:
  /// Maps `bytes` of the descriptor, and at least a page. With `protects` it maps them twice, the
  /// second time read-only. Throws NoSharedMemory, or Error(kSystem).
  Region(const Fd& fd, std::size_t bytes, bool protects);

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

 private:
  const std::size_t bytes_;
  const bool protects_;
  const Mapping memory_;
  const Mapping read_only_;
};

/// Makes a region, and gives it to all processes of the same user that know its address, until it
/// is closed.
class RegionOffer {
 public:
  /// A page is the system's until a rank touches it: so each rank's rows lie near its processor.
  /// Throws NoSharedMemory, or Error(kSystem).
  RegionOffer(std::size_t bytes, bool protects);
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

/// Maps the region that another process of this host offers: `bytes` and `protects` as there.
/// Throws Error(kSystem).
std::shared_ptr<Region> take_region(const std::string& address, std::size_t bytes, bool protects,
                                    SocketDeadline deadline);

}  // namespace dreamcomm

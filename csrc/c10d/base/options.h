// The options of a group.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/base/device_kind.h"
#include "transport/bootstrap/connect_shm.h"

namespace dreamcomm {

inline constexpr const char* kBackendName = "dreamcomm";

struct DreamOptions : c10d::Backend::Options {
  explicit DreamOptions(std::chrono::milliseconds limit = kBackendDefaultTimeout)
      : c10d::Backend::Options(kBackendName, limit) {}

  /// torch 2.14 calls it where it copies options; earlier ones do not know it.
  virtual c10::intrusive_ptr<c10d::Backend::Options> clone() const {
    return c10::make_intrusive<DreamOptions>(*this);
  }

  std::string algorithm = "auto";
  bool fixed_order = true;
  std::size_t page_bytes = ShmOptions{}.page_bytes;
  std::size_t message_bytes = ShmOptions{}.message_bytes;
  bool shared_memory = true;
  std::size_t heap_bytes = Heap::default_bytes();  // 0: no heap
  std::string costs = "auto";                      // or "fixed", or a file's path
  std::string cuda = "nccl";                       // or "dreamcomm"
  std::size_t cuda_heap_bytes = 0;                 // of registered memory; 0: none
  std::string internode_dtype = "float32";         // or "16bit"
  std::string hosts;                               // of the job's ranks, "a,a,b"; "": as found
  bool log = false;                                // of operations' times
  DeviceKind device;                               // what "dreamcomm" stands for
};

/// The table's name of an algorithm that is also known as two_shot or zero_copy; of others itself.
std::string algorithm_named(const std::string& name);

/// Throws c10::ValueError if an option has no meaning, whatever the group.
void require_valid(const DreamOptions& options);

/// A copy, its timeout bounded. Throws c10::ValueError if they are another backend's.
c10::intrusive_ptr<DreamOptions> own_options(
    const c10::intrusive_ptr<c10d::Backend::Options>& opts);

/// The hosts that the option names for a group's ranks, or none. Throws c10::ValueError where it
/// names too few.
std::vector<std::string> hosts_of(const DreamOptions& options, int size);

/// How long ranks wait for each other to make a group, or to bootstrap their devices.
std::chrono::milliseconds rendezvous_timeout(const DreamOptions& options);
std::chrono::milliseconds rendezvous_timeout(std::chrono::milliseconds timeout);

/// The part of that time for connecting each host's ranks and, by Gloo, the nodes. It is shorter,
/// so that ranks which wait for a rank that cannot connect get the reason before their own time
/// is over.
std::chrono::milliseconds time_to_connect(const DreamOptions& options);

}  // namespace dreamcomm

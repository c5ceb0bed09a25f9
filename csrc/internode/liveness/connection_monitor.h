// Whether ranks of other hosts are still connected.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/error.h"
#include "internode/liveness/wait_interrupter.h"
#include "transport/link.h"
#include "transport/topology.h"

namespace dreamcomm {

/// An engine tells who waits for a message that has not begun, but may not tell of one that has
/// come in part when its connection ends (Gloo does not). So receives are left standing for
/// messages that never come. INVARIANT: they begin with the group. A receive writes to the sender,
/// and who writes to a rank that has left in good order loses what is still on its way from there.
class ConnectionMonitor {
 public:
  /// No other message's tag.
  static constexpr std::uint32_t kTag = 0xfffd;

  /// All must outlive this. Throws Error(kPeerLost).
  ConnectionMonitor(Link& link, WaitInterrupter& interrupter, const Topology& topology, int rank)
      : interrupter_(interrupter) {
    for (int peer = 0; peer < topology.size(); ++peer) {
      if (topology.host_of(peer) == topology.host_of(rank)) continue;
      const Cargo room{std::make_shared<std::byte>(), 0, 1};
      standing_[peer] = link.receive(peer, room, kTag);
    }
  }

  /// Throws Error(kPeerLost) if `rank` has gone. Takes a glance's tick or two. Any thread.
  void glance(int rank) {
    const std::scoped_lock lock(mutex_);
    glances_.wait(*standing_.at(rank));
  }
  /// Whether a parcel of `rank` has come, if the rank has gone. Throws Error(kPeerLost) if it has
  /// and the parcel has not come. One thread at a time.
  bool look(int rank, Parcel& parcel) {
    try {
      glance(rank);
      return false;
    } catch (const Error&) {
      // The rank may have left in good order: what it sent has come by now. One that was called
      // back meanwhile says so the second time.
      if (interrupter_.wait(parcel) || interrupter_.wait(parcel)) return true;
      throw;
    }
  }

  /// The ranks whose connections have ended, and how. Waits for no rank. Any thread.
  std::map<int, std::string> lost() {
    const std::scoped_lock lock(mutex_);
    std::map<int, std::string> found;
    for (const auto& [rank, parcel] : standing_) {
      try {
        parcel->interrupt();
        parcel->wait();
      } catch (const Error& error) {
        found.emplace(rank, error.what());
      }
    }
    return found;
  }

 private:
  WaitInterrupter& interrupter_;
  std::mutex mutex_;  // of the waits for these, as several threads look:
  WaitInterrupter glances_{std::chrono::milliseconds(1)};
  std::map<int, std::shared_ptr<Parcel>> standing_;
};

}  // namespace dreamcomm

// Monitors whether ranks of other hosts are still connected.
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

/// An engine reports the end of a connection to a wait for a message that has not begun. It may not
/// report it for a message that has arrived in part (Gloo does not). So standing receives wait for
/// messages that are never sent.
/// INVARIANT: they begin with the group. A receive writes to the sender, and a rank that writes to
/// a rank that has left cleanly loses what is still on its way from there.
class ConnectionMonitor {
 public:
  /// A tag that no other message has.
  static constexpr std::uint32_t kTag = 0xfffd;

  /// All arguments must outlive this. Throws Error(kPeerLost).
  ConnectionMonitor(Link& link, WaitInterrupter& interrupter, const Topology& topology, int rank)
      : interrupter_(interrupter) {
    for (int peer = 0; peer < topology.size(); ++peer) {
      if (topology.host_of(peer) == topology.host_of(rank)) continue;
      const Cargo room{std::make_shared<std::byte>(), 0, 1};
      standing_[peer] = link.receive(peer, room, kTag);
    }
  }

  /// Throws Error(kPeerLost) if `rank` is lost. Takes one or two ticks of the interrupter.
  /// Any thread.
  void check_alive(int rank) {
    const std::scoped_lock lock(mutex_);
    checks_.wait(*standing_.at(rank));
  }
  /// If `rank` is lost: returns true if its parcel has arrived, and throws Error(kPeerLost) if not.
  /// Otherwise returns false. One thread at a time.
  bool look(int rank, Parcel& parcel) {
    try {
      check_alive(rank);
      return false;
    } catch (const Error&) {
      // The rank may have left cleanly: all that it sent has arrived by now. A wait that was
      // interrupted meanwhile returns true the second time.
      if (interrupter_.wait(parcel) || interrupter_.wait(parcel)) return true;
      throw;
    }
  }

  /// Returns the ranks whose connections have ended, and the errors. Waits for no rank. Any thread.
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
  std::mutex mutex_;  // guards the waits below: several threads check
  WaitInterrupter checks_{std::chrono::milliseconds(1)};
  std::map<int, std::shared_ptr<Parcel>> standing_;
};

}  // namespace dreamcomm

// Ranks as processes of one host and user: windows are memfds, handed over Unix
// sockets that stay open so that the kernel reports a peer's death.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/store.h"
#include "transport/fabric.h"
#include "transport/introspect/call_site_query.h"
#include "transport/os/unix_socket.h"
#include "transport/rank_numbering.h"
#include "transport/shm/heap.h"
#include "transport/topology.h"

namespace dreamcomm {

struct ShmOptions {
  std::size_t page_bytes = std::size_t{512} << 10;    // of collective staging, twice per rank
  std::size_t message_bytes = std::size_t{64} << 10;  // of one message buffer
  std::chrono::milliseconds timeout{30 * 60 * 1000};  // for the other ranks to arrive
  std::shared_ptr<Heap> heap;  // of this process, for the peers to map; null: none
  std::string no_heap{};       // why a wanted heap is missing: then no rank shares its heap
  std::vector<std::string>
      settings{};  // further settings, equal on all ranks: name=value, no spaces
  std::map<std::string, std::string> remedies{};   // what to do where the setting so named differs
  std::string group = "a group";                   // the name in setup errors
  RankNumbering numbers{};                         // the ranks' numbers there
  std::function<void(const std::string&)> warn{};  // shows the user a warning; may be null
  /// Creates the service that asks late ranks for their call site; may be null, or return null:
  /// then they are not asked.
  std::function<std::shared_ptr<CallSiteService>()> make_call_sites{};
  /// Why a rank that has not arrived will not, as far as is known, or ""; may be null.
  std::function<std::string(int rank)> will_not_come{};
  /// The host that each rank belongs to, by name: ranks of different hosts share nothing, as if
  /// they could not. Empty: all ranks share that can.
  std::vector<std::string> hosts{};
  /// Called where not all share; may be null. INVARIANT: no rank leaves this bootstrap for its
  /// host's own before all ranks have called it, because it needs what each publishes then.
  std::function<void()> on_hosts{};
  bool refuse = false;  // share no memory, as if the system gave none
};

/// The result of trying to map every peer's memory.
struct ShmResult {
  std::unique_ptr<Fabric> fabric;  // null if any pair of ranks shares no memory
  std::string reason;              // the same text on every rank: why, or why not
  std::string no_heap;             // likewise: why existing heaps are not shared, or ""
  Topology topology;  // the same on every rank; of no ranks where all share or one refuses
  std::array<std::uint8_t, 16> team{};  // likewise, and another for each group
  std::vector<std::string> apart{};     // likewise: why each rank does not share with all, or ""
  std::vector<Fd> processes{};  // if there are hosts: shows the end of each rank of this host
};

/// Collective over all ranks: each tries to map every other's memory. The store must be private to
/// this group. Throws Error if a rank does not arrive in time, or the ranks' options or versions
/// differ.
ShmResult connect_shm(Store& store, int rank, int size, const ShmOptions& options);

}  // namespace dreamcomm

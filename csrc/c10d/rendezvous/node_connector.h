// Makes a group's parts that cross nodes, and reports to all ranks why one could not be made.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "c10d/base/options.h"
#include "c10d/base/python_callbacks.h"
#include "c10d/base/store_ptr.h"
#include "c10d/base/torch_fallback.h"
#include "c10d/rendezvous/connect_nodes.h"
#include "c10d/rendezvous/deadline_store.h"
#include "c10d/rendezvous/store_worker.h"
#include "comm/communicator.h"
#include "transport/bootstrap/connect_shm.h"
#include "transport/topology.h"

namespace dreamcomm {

/// Runs `act`, a step of a group's set-up. Its errors then open with the group and this rank;
/// `step` says what the ranks did.
void while_made(const DreamOptions& options, int rank, int size, const char* step,
                const std::function<void()>& act);
inline constexpr const char* kMeasured = ", whose costs were being measured";
inline constexpr const char* kMet = ", whose ranks were meeting";

/// Serves one rank while it makes a group on several nodes. The references must outlive it.
class NodeConnector {
 public:
  struct Group {
    int rank;
    int size;
    c10::intrusive_ptr<DreamOptions> options;
    const PythonCallbacks& callbacks;
    StorePtr store;  // the group's
    const Interrupt& interrupt;
  };
  NodeConnector(Group group, const Topology& topology, std::shared_ptr<StoreWorker> worker);

  /// A connection that begins now; `carries` "calls" or "messages".
  Connection begin(const std::string& carries) const;
  /// Connects this host's ranks, as the bootstrap that found the hosts did with `options`; `whole`
  /// is its result. Throws Error.
  ShmResult connect_this_host(const Connection& calls, const ShmOptions& options,
                              const ShmResult& whole) const;
  /// Connects with the ranks of all nodes by torch's Gloo. `host` is this host's communicator.
  Fallback::Inner connect(const Connection& made, const std::shared_ptr<Communicator>& host,
                          const StorePtr& store) const;
  /// Runs the first use of a connection: errors also name the ranks that sent nothing.
  void first_use(const Connection& made, const std::shared_ptr<Communicator>& host,
                 const char* step, const std::function<void()>& use) const;

 private:
  Fallback::Inner make_gloo(const Connection& made,
                            const c10::intrusive_ptr<DeadlineStore>& store) const;

  const Group group_;
  const Topology& topology_;
  const std::shared_ptr<StoreWorker> worker_;
};

}  // namespace dreamcomm

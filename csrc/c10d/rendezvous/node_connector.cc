#include "c10d/rendezvous/node_connector.h"

#include <utility>

#include "c10d/base/gil_signals.h"
#include "c10d/rendezvous/multinode_group.h"
#include "c10d/rendezvous/rendezvous.h"
#include "core/error.h"

namespace dreamcomm {

void while_made(const DreamOptions& options, int rank, int size, const char* step,
                const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    throw Error(error.kind(), concat("setting up ", group_being_made(options), " on rank ", rank,
                                     " of ", size, step, ": ", error.what()));
  }
}

NodeConnector::NodeConnector(Group group, const Topology& topology,
                             std::shared_ptr<StoreWorker> worker)
    : group_(std::move(group)), topology_(topology), worker_(std::move(worker)) {}

Connection NodeConnector::begin(const std::string& carries) const {
  return {{topology_, group_.rank}, carries, time_to_connect(*group_.options), group_.interrupt};
}

ShmResult NodeConnector::connect_this_host(const Connection& calls, const ShmOptions& options,
                                           const ShmResult& whole) const {
  ShmOptions in_time = options;
  in_time.timeout = calls.time;
  in_time.will_not_come =
      watch_on_mates(calls, options.will_not_come, whole, reasons_through(worker_));
  return connect_host(group_.store, calls.place, in_time, whole);
}

Fallback::Inner NodeConnector::connect(const Connection& made,
                                       const std::shared_ptr<Communicator>& host,
                                       const StorePtr& store) const {
  const DeadlineStore::Watch watch = watch_on(made, host, worker_);
  return connect_hosts(made, *worker_, reasons_through(worker_), [&] {
    return make_gloo(made, c10::make_intrusive<DeadlineStore>(store, made.end(), watch));
  });
}

/// Torch does not name the rank it could not reach; what other ranks posted says more.
Fallback::Inner NodeConnector::make_gloo(const Connection& made,
                                         const c10::intrusive_ptr<DeadlineStore>& store) const {
  try {
    return group_.callbacks.make_inner(store, group_.rank, group_.size, group_.options, "hosts");
  } catch (const std::exception& error) {
    if (is_foreign(error)) throw;
    const auto watch = [&] { return store->trouble(); };
    const std::string known = made.is_nearly_over() ? watch() : cause_soon(watch);
    const std::string own = gloo_error_text(error.what());
    const bool is_all = !known.empty() && own.find(known) != std::string::npos;
    throw Error(
        ErrorKind::kPeerLost,
        concat("rank ", group_.rank, " of ", group_.size, " in group '", group_.options->group_name,
               "' could not connect with the ranks of other hosts: ", is_all ? "" : own + "; ",
               known.empty() ? "a rank there may have ended or not been reached" : known));
  }
}

void NodeConnector::first_use(const Connection& made, const std::shared_ptr<Communicator>& host,
                              const char* step, const std::function<void()>& use) const {
  while_made(*group_.options, group_.rank, group_.size, step, [&] {
    dreamcomm::first_use(made, *worker_, reasons_through(worker_), watch_on(made, host, worker_),
                         use);
  });
}

}  // namespace dreamcomm

#include "c10d/rendezvous/liveness.h"

#include <utility>

#include "c10d/process/process_singleton.h"
#include "core/error.h"

namespace dreamcomm {
namespace {

std::string end_key(int rank) { return concat("ended/", rank); }

ProcessSingleton<Liveness>& liveness_of_process() {
  static ProcessSingleton<Liveness> only;
  return only;
}

}  // namespace

void set_liveness(const std::shared_ptr<Liveness>& one) { liveness_of_process().set(one); }
std::shared_ptr<Liveness> liveness() { return liveness_of_process().get(); }

Liveness::Liveness(std::shared_ptr<Communicator> all, std::shared_ptr<StoreWorker> worker)
    : Liveness(all, Topology(), all->rank(), std::move(worker)) {}

Liveness::Liveness(std::shared_ptr<Communicator> host, Topology topology, int rank,
                   std::shared_ptr<StoreWorker> worker)
    : host_(std::move(host)),
      topology_(std::move(topology)),
      rank_(rank),
      worker_(std::move(worker)),
      group_order_(rank, worker_) {}

bool Liveness::has_ended(int rank) {
  if (topology_.size() == 0) return host_->has_ended(rank);
  if (rank < 0 || rank >= topology_.size()) return false;
  if (topology_.host_of(rank) == topology_.host_of(rank_)) {
    if (!has_ended_here(rank)) return false;
    tell(rank);
    return true;
  }
  {
    const std::scoped_lock lock(mutex_);
    if (told_.contains(rank)) return true;
  }
  if (worker_->read(end_key(rank)).value_or("").empty()) return false;
  const std::scoped_lock lock(mutex_);
  told_.insert(rank);
  return true;
}

void Liveness::tell_of_host() {
  if (topology_.size() == 0) return;
  for (const int rank : topology_.ranks(topology_.host_of(rank_))) {
    if (has_ended_here(rank)) tell(rank);
  }
}

bool Liveness::has_ended_here(int rank) const {
  return rank != rank_ && host_->has_ended(topology_.index_of(rank));
}

/// INVARIANT: an end is final, so a post stays true, and any rank may be the first to post it.
void Liveness::tell(int rank) {
  {
    const std::scoped_lock lock(mutex_);
    if (!told_.insert(rank).second) return;
  }
  worker_->set(end_key(rank), "1");
}

}  // namespace dreamcomm

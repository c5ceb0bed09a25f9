// Connects the ranks of several nodes through torch's Gloo, and names the ranks that are missing,
// which Gloo does not.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "c10d/base/torch_fallback.h"
#include "c10d/rendezvous/deadline_store.h"
#include "c10d/rendezvous/multinode_group.h"
#include "c10d/rendezvous/store_worker.h"
#include "c10d/rendezvous/torch_store.h"
#include "comm/communicator.h"
#include "core/request.h"
#include "internode/liveness/abort_reasons.h"

namespace dreamcomm {

/// One connection of all ranks. INVARIANT: the ranks' bootstrap has just ended when it begins, and
/// each posts when it has connected or failed, also if only within its host; so a rank that has
/// posted nothing a moment after the time is over was held up, or has ended. (With fixed costs the
/// connection for messages begins on each rank when its calls have connected, so not on all at one
/// time: then some errors may name no rank.)
struct Connection {
  Place place;
  std::string carries;             // "calls" or "messages"
  std::chrono::milliseconds time;  // that it takes if a rank is missing
  const std::function<void()>& interrupt;
  Clock::time_point begin = Clock::now();

  Clock::time_point end() const { return deadline_in(begin, time); }
  /// Until then other ranks may still connect.
  bool is_nearly_over() const {
    return Clock::now() >= deadline_in(begin, time - std::min(time / 10, kLastMoment));
  }
  static constexpr std::chrono::milliseconds kLastMoment{800};
};

/// Why a rank of this host does not take part in this host's bootstrap, the first step of
/// `connection`: what `known` says, or its process has ended since the bootstrap of all, whose
/// result is `whole`, or a rank has aborted the group since. The references must outlive the
/// result.
std::function<std::string(int rank)> watch_on_mates(
    const Connection& connection, const std::function<std::string(int rank)>& known,
    const ShmResult& whole, const AbortReasons& reasons);

/// Why a connection cannot be made, as far as is known: a rank of this host has ended, or some rank
/// has aborted the group. It keeps neither pointer alive, as Gloo may use it for long after.
DeadlineStore::Watch watch_on(const Connection& connection,
                              const std::shared_ptr<Communicator>& part,
                              const std::shared_ptr<StoreWorker>& worker);

/// Returns the watch's text, waiting a moment for it: a connection ends, or is refused, before the
/// end of its process is known, and the reason takes a while to arrive.
std::string cause_soon(const DeadlineStore::Watch& watch);

/// Makes `connection` by `connect` and returns the result. On an Error it posts the reason for the
/// other ranks, and adds what is known of them.
Fallback::Inner connect_hosts(const Connection& connection, StoreWorker& worker,
                              const AbortReasons& reasons,
                              const std::function<Fallback::Inner()>& connect);

/// Runs `use`, the first use of a connection. On an Error it posts the reason for the other ranks,
/// and adds what `watch` says by then and the ranks that posted nothing. The other ranks' reasons
/// are not enough: a rank that could not connect posts so at once, and only later with which rank.
void first_use(const Connection& connection, StoreWorker& worker, const AbortReasons& reasons,
               const DeadlineStore::Watch& watch, const std::function<void()>& use);

/// The first line of an error of Gloo's, without its place in Gloo's sources.
std::string gloo_error_text(const std::string& text);

}  // namespace dreamcomm

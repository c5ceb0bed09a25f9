// Connecting the ranks of several hosts through torch's Gloo, which names nobody who does not come.
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

/// What is connected. INVARIANT: all ranks have met just before it begins, and each says when it
/// has connected or failed, also where that was with those of its host only; so of whom nothing is
/// heard a moment after the time is over has been held up, or has ended. (With fixed costs what
/// carries messages begins where a rank's calls have connected, so not on all at one time: then
/// some may name nobody.)
struct Connection {
  Place place;
  std::string carries;             // "calls" or "messages"
  std::chrono::milliseconds time;  // that it takes where one does not come
  const std::function<void()>& interrupt;
  Clock::time_point begin = Clock::now();

  Clock::time_point end() const { return deadline_in(begin, time); }
  /// Before, others may connect yet.
  bool is_nearly_over() const {
    return Clock::now() >= deadline_in(begin, time - std::min(time / 10, kLastMoment));
  }
  static constexpr std::chrono::milliseconds kLastMoment{800};
};

/// Why a rank of this one's host does not come to the meeting of that host's, which `connection`
/// begins with: as `known` says, or as it has ended since all met, of which `whole` came, or some
/// rank has aborted the group since. The references must outlive what is returned.
std::function<std::string(int rank)> watch_on_mates(
    const Connection& connection, const std::function<std::string(int rank)>& known,
    const ShmResult& whole, const AbortReasons& reasons);

/// Why a connection will not come about, as far as is known: a rank of this host has ended, or some
/// rank has aborted the group. It keeps neither of them, as Gloo may go on with it for long after.
DeadlineStore::Watch watch_on(const Connection& connection,
                              const std::shared_ptr<Communicator>& part,
                              const std::shared_ptr<StoreWorker>& worker);

/// What the watch says within a moment: connections end, and are refused, before it is known what
/// became of their process, and word of it takes a while.
std::string cause_soon(const DeadlineStore::Watch& watch);

/// What `connect` returns, which makes `connection`. Where it throws Error, the others are told
/// why, and with it is thrown what is known of them.
Fallback::Inner connect_hosts(const Connection& connection, StoreWorker& worker,
                              const AbortReasons& reasons,
                              const std::function<Fallback::Inner()>& connect);

/// The first thing that is done with what connect_hosts() returned. Where it throws Error, the
/// others are told why, and with it is thrown what `watch` says by then, and of whom nothing is
/// heard. Others' words do not do: one that could not connect tells so at once, and only later,
/// when it has listened, with whom.
void first_use(const Connection& connection, StoreWorker& worker, const AbortReasons& reasons,
               const DeadlineStore::Watch& watch, const std::function<void()>& use);

/// Gloo's words: the first line, without where in its sources it found them.
std::string words_of_gloo(const std::string& text);

}  // namespace dreamcomm

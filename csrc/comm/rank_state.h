// This rank as part of its group: its name in messages, and whether it has failed.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/request.h"
#include "transport/fabric.h"
#include "transport/introspect/window_reader.h"
#include "transport/wait.h"

namespace dreamcomm {

/// "3.1 s", "50 ms"
std::string in_seconds(Clock::duration time);

/// "group '1' (ranks 2, 3 of the job)"; `world_ranks` of its ranks in the job, empty: the same.
std::string describe_group(const std::string& name, const std::vector<int>& world_ranks);

class RankState {
 public:
  using Warn = std::function<void(const std::string&)>;
  /// `world_ranks`: the job's ranks of the (whole) group's ranks; empty: the same.
  RankState(Fabric& fabric, std::string group, Warn warn = {},
            const std::vector<int>& world_ranks = {});

  int rank() const { return fabric_.rank(); }
  int size() const { return fabric_.size(); }
  Fabric& fabric() const { return fabric_; }
  Header& header() const { return fabric_.header(rank()); }
  /// The waiting policy for peers. It is determined once, because that reads files.
  Patience& patience() { return patience_; }

  /// Warns the user of a possible error. Any thread.
  void warn(const std::string& text) const {
    if (warn_) warn_(text);
  }
  /// "rank 1 of 4 in group 'default'", "rank 0 of 2 in group '1' (ranks 2, 3 of the job)".
  std::string who() const;
  /// "group '1' (ranks 2, 3 of the job)".
  std::string group() const { return concat("group '", group_, "'", in_job_); }

  /// Marks the group unusable for this rank and informs the peers. The first reason stays. Any
  /// thread.
  void fail(ErrorKind kind, const std::string& reason);
  bool failed() const { return failed_.has(1); }
  std::optional<std::string> failure() const;
  /// The kind of failure; nothing after leave(), too.
  std::optional<ErrorKind> failure_kind() const;
  /// Throws Error(kAborted) if the group is unusable.
  void check_usable(const char* operation) const;

  /// Shows the peers that this rank has left cleanly.
  void leave();

  /// Wakes every peer that may wait for something this rank published.
  void ring_peers() const;
  /// Wakes the threads of this rank. Threads that wait only for other threads of the rank sleep at
  /// `bell`, so that peers need not ring them.
  void ring_own();
  Doorbell& bell() { return bell_; }

  /// Describes a peer's last action in this group.
  std::string last_act(int peer) const;
  /// Describes that, and what its process does instead. Reads files, and asks the process, which
  /// may answer until then.
  std::string does(int peer, Clock::time_point until) const;
  /// How long peers may answer at the end of a wait that has lasted `waited`: a twelfth of that,
  /// within bounds.
  static Clock::time_point answer_until(Clock::duration waited);
  /// Sends the question of does() ahead; asking many ranks then takes no longer than asking one.
  void inquire(int peer) const { fabric_.inquire(peer); }

 private:
  RankView view_of(int peer) const;

  Fabric& fabric_;
  Patience patience_;
  std::string group_;
  const std::string in_job_;
  const Warn warn_;
  Flag failed_;
  Doorbell bell_;
  mutable std::mutex mutex_;
  std::string reason_;
  std::optional<ErrorKind> kind_;
};

}  // namespace dreamcomm

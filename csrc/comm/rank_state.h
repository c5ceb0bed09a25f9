// This rank as part of its group: its name in messages, and whether it is well.
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
std::string words_on_group(const std::string& name, const std::vector<int>& world_ranks);

class RankState {
 public:
  using Warn = std::function<void(const std::string&)>;
  /// `world_ranks`: of the ranks of the (whole) group in the job; empty: the same.
  RankState(Fabric& fabric, std::string group, Warn warn = {},
            const std::vector<int>& world_ranks = {});

  int rank() const { return fabric_.rank(); }
  int size() const { return fabric_.size(); }
  Fabric& fabric() const { return fabric_; }
  Header& header() const { return fabric_.header(rank()); }
  /// Of waits for peers. Found out once: it takes a look into files.
  Patience& patience() { return patience_; }

  /// Tells the user what may become an error. Any thread.
  void warn(const std::string& text) const {
    if (warn_) warn_(text);
  }
  /// "rank 1 of 4 in group 'default'", "rank 0 of 2 in group '1' (ranks 2, 3 of the job)".
  std::string who() const;
  /// "group '1' (ranks 2, 3 of the job)".
  std::string group() const { return concat("group '", group_, "'", in_job_); }

  /// Marks the group unusable for this rank and tells the peers. The first
  /// reason stays. Any thread.
  void fail(ErrorKind kind, const std::string& reason);
  bool failed() const { return failed_.has(1); }
  std::optional<std::string> failure() const;
  /// What kind of failure; nothing after leave(), too.
  std::optional<ErrorKind> failure_kind() const;
  /// Throws Error(kAborted) if the group is unusable.
  void check_usable(const char* operation) const;

  /// Tells the peers that this rank has left in good order.
  void leave();

  /// Wakes everyone who may wait for something this rank published.
  void ring_peers() const;
  /// Wakes the threads of this rank: `bell` is where those sleep that wait for
  /// other threads of the rank only, so that peers need not ring them.
  void ring_own();
  Doorbell& bell() { return bell_; }

  /// What a peer last did in this group, in words.
  std::string last_act(int peer) const;
  /// That, and what its process does instead. Reads files, and asks the process, which may answer
  /// until then.
  std::string does(int peer, Clock::time_point until) const;
  /// Until when peers may answer at the end of a wait that has lasted `waited`: a twelfth of that,
  /// in bounds.
  static Clock::time_point answer_until(Clock::duration waited);
  /// Asks ahead of does(), which then takes the same time for many ranks.
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

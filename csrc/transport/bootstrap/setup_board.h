// The board on which ranks publish to each other, through the store, while they set a group up.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "core/error.h"
#include "core/store.h"
#include "transport/rank_numbering.h"

namespace dreamcomm {

class SetupBoard {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  /// Describes a lost rank that keeps `awaited`, or ranks that wait for it, from arriving; or "".
  using Lost = std::function<std::string(int awaited)>;

  /// `group` and `numbers`: the names of the group and its ranks in errors.
  SetupBoard(Store& store, int rank, int size, std::chrono::milliseconds timeout, Lost lost,
             std::string group = "a group", RankNumbering numbers = {});

  /// The beginning of setup errors.
  std::string where() const;
  void publish(const char* what, const std::string& value);
  /// Returns what rank `r` has published. Throws Error: kTimeout at the deadline; kPeerLost if
  /// another rank has reported an error, or is lost.
  std::string get(const char* what, int r);
  Deadline deadline() const { return deadline_; }
  /// Waits until `done(until)`, which waits until then, returns true; returns false at the
  /// deadline. Throws Error as get() does if another rank has reported an error, and what ends a
  /// wait for the store.
  bool await(const std::function<bool(Deadline until)>& done);

  /// Reports that this rank cannot set the group up, so that the others need not wait for their
  /// timeouts. The first rank to fail reports why. After a mismatch, this rank stays until all have
  /// seen the report, because its process may run the store. If the store has failed too,
  /// nothing is reported.
  void abort(const Error& error);

 private:
  std::chrono::milliseconds left() const;
  void look_for_trouble();
  void publish_trouble(const Error& error);
  void wait_until_seen();

  Store& store_;
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const Deadline deadline_;
  const Lost lost_;
  const std::string group_;
  const RankNumbering numbers_;
};

}  // namespace dreamcomm

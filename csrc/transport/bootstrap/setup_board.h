// What the ranks of a group that is being made tell each other through the store.
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
  /// Which rank has gone, and so keeps `awaited` or those behind it from coming, in words; or "".
  using Lost = std::function<std::string(int awaited)>;

  /// `group` as errors name it, and its ranks as they number them.
  SetupBoard(Store& store, int rank, int size, std::chrono::milliseconds timeout, Lost lost,
             std::string group = "a group", RankNumbering numbers = {});

  /// What errors of making the group begin with.
  std::string where() const;
  void publish(const char* what, const std::string& value);
  /// What rank `r` has published. Throws Error: kTimeout at the deadline; kPeerLost where another
  /// rank has told of trouble, or has gone.
  std::string get(const char* what, int r);
  Deadline deadline() const { return deadline_; }
  /// Until `come(until)`, which looks until then, says so; false at the deadline. Throws Error as
  /// get() does where another rank has told of trouble, and what ends a wait for the store.
  bool await(const std::function<bool(Deadline until)>& come);

  /// This rank cannot make the group: the others need not wait for their timeouts. The first to
  /// fail tells why. If the ranks contradict each other it stays until all have seen that, as it
  /// may be the one that keeps the store. Where the store has failed, too, nothing is told.
  void give_up(const Error& error);

 private:
  std::chrono::milliseconds left() const;
  void look_for_trouble();
  void tell_trouble(const Error& error);
  void stay_until_heard();

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

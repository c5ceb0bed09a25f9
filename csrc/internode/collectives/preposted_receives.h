// The first messages of calls between hosts, whose receives begin a call ahead.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "transport/link.h"

namespace dreamcomm {

/// A message leaves at once where the receiver has said before that there is room for it; else when
/// that comes: a second way over the wire. INVARIANT: what is said of a call's room is sent before
/// this rank's own first message of the call before, for which the peer waits: it comes before the
/// peer can have left, see ConnectionMonitor.
class PrepostedReceives {
 public:
  struct Expected {
    Cargo room;
    std::shared_ptr<Parcel> parcel;
  };
  using Expect = std::function<Expected(std::uint32_t tag)>;

  /// The receive of what `rank` sends as this call opens. Begins that of the next call.
  Expected from(int rank, const Expect& expect) {
    const auto next = next_.find(rank);
    Expected now = next == next_.end() ? expect(tag_of(opened_)) : std::move(next->second);
    next_[rank] = expect(tag_of(opened_ + 1));
    return now;
  }
  /// Of what this rank sends as this call opens.
  std::uint32_t tag() const { return tag_of(opened_); }
  /// It has: the same number of calls on all leaders.
  void opened() { ++opened_; }

 private:
  /// No other message's.
  static constexpr std::uint32_t tag_of(std::uint32_t opening) {
    return (opening << 16U | 0xffffU) & Link::kMostTag;
  }

  std::uint32_t opened_ = 0;
  std::map<int, Expected> next_;  // by rank
};

}  // namespace dreamcomm

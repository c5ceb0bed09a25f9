// The first messages of calls between hosts: their receives are posted a call ahead.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "transport/link.h"

namespace dreamcomm {

/// A message leaves at once if the receiver has announced before that it has room for it. Otherwise
/// it leaves when the announcement arrives, a second transfer over the wire later.
/// INVARIANT: the announcement for a call is sent before this rank's own first message of the call
/// before, for which the peer waits. So it arrives before the peer can have left, see
/// ConnectionMonitor.
class PrepostedReceives {
 public:
  struct Expected {
    Cargo room;
    std::shared_ptr<Parcel> parcel;
  };
  using Expect = std::function<Expected(std::uint32_t tag)>;

  /// Returns the receive of what `rank` sends as this call opens, and posts that of the next call.
  Expected from(int rank, const Expect& expect) {
    const auto next = next_.find(rank);
    Expected now = next == next_.end() ? expect(tag_of(opened_)) : std::move(next->second);
    next_[rank] = expect(tag_of(opened_ + 1));
    return now;
  }
  /// The tag of what this rank sends as this call opens.
  std::uint32_t tag() const { return tag_of(opened_); }
  /// The call has opened: the same number of calls on all leaders.
  void opened() { ++opened_; }

 private:
  /// A tag that no other message has.
  static constexpr std::uint32_t tag_of(std::uint32_t opening) {
    return (opening << 16U | 0xffffU) & Link::kMostTag;
  }

  std::uint32_t opened_ = 0;
  std::map<int, Expected> next_;  // by rank
};

}  // namespace dreamcomm

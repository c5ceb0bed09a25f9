// A rank as tools see it from outside of its job: by its window's first bytes alone.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "core/types.h"
#include "transport/window.h"

namespace dreamcomm {

/// Read while the rank goes on: each number is whole, but they are not of one moment.
struct RankView {
  std::uint32_t version = 0;  // where it is another than kProtocolVersion, all else is empty
  int pid = 0;
  int rank = 0;
  int size = 0;
  std::string team;   // equal for the ranks of a group, in hexadecimal digits
  std::string group;  // its name
  Status status = Status::kActive;
  std::string reason;  // of a failure
  std::int64_t sequence = 0;
  Kind kind = Kind::kBarrier;  // of call `sequence`
  std::optional<Kind> before;  // of the call before
  std::int64_t bytes = 0;      // of its largest tensor
  std::int64_t entered_ns = 0;
  bool inside = false;
  bool away = false;             // it waits for ranks of other hosts there
  bool answers_barrier = false;  // it is in a monitored barrier
  std::int64_t barrier_began_ns = 0;
  int waiting_for = -1;
  struct Counts {
    std::int64_t calls = 0;
    std::int64_t sent = 0;
    std::int64_t received = 0;
  };
  std::array<Counts, kKinds> counts{};
  struct Message {  // the one that is under way for longest
    Kind kind = Kind::kSend;
    int peer = -1;  // -1: any
    std::int64_t bytes = 0;
    std::int64_t since_ns = 0;
  };
  std::int64_t messages = 0;  // under way
  Message oldest;             // if there are any
};

/// Of a group on several hosts: of its part on this one, whose ranks count from 0 on, but for what
/// whose window it is. Of a rank that has not made the group yet: version and pid alone.
RankView view_of(const Header& header);
/// Of the whole group, whose ranks are the group's.
RankView whole_view_of(const Header& header);

/// Whether it was seen in a call of its group.
inline bool is_busy(const RankView& rank) { return rank.inside || rank.answers_barrier; }

/// "is in broadcast as call 3, entered 2.1 s ago" and the like.
std::string last_act(const RankView& rank);

/// Of the window that `path` (/proc/PID/fd/N) opens, or nothing, if it is no window, or
/// another user's, or gone by now.
std::optional<RankView> observe(const std::string& path);

}  // namespace dreamcomm

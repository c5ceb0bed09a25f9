// Reads a rank's state from outside of its job: from its window's first bytes alone.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "core/types.h"
#include "transport/window.h"

namespace dreamcomm {

/// Read while the rank runs: each number is whole, but they are not of one moment.
struct RankView {
  std::uint32_t version = 0;  // if it is not kProtocolVersion, all else is empty
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
  struct Message {  // the message that has been under way for longest
    Kind kind = Kind::kSend;
    int peer = -1;  // -1: any
    std::int64_t bytes = 0;
    std::int64_t since_ns = 0;
  };
  std::int64_t messages = 0;  // under way
  Message oldest;             // if there are any
};

/// Reads the rank's state. In a multi-node group that is the state of its part on this host, whose
/// ranks count from 0; only the window's identity is the group's. A rank that has not set the group
/// up yet gives version and pid alone.
RankView view_of(const Header& header);
/// Reads the rank's state in the whole group, with the group's ranks.
RankView whole_view_of(const Header& header);

/// True if it was seen in a call of its group.
inline bool is_busy(const RankView& rank) { return rank.inside || rank.answers_barrier; }

/// "is in broadcast as call 3, entered 2.1 s ago" and the like.
std::string last_act(const RankView& rank);

/// Reads the window that `path` (/proc/PID/fd/N) opens. Returns nothing if it is no window, is
/// another user's, or is closed by now.
std::optional<RankView> observe(const std::string& path);

}  // namespace dreamcomm

// How the ranks of a group see each other's windows. One subclass per transport.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/window.h"

namespace dreamcomm {

enum class PeerState { kAlive, kGone };

class Fabric {
 public:
  virtual ~Fabric() = default;
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  int rank() const { return rank_; }
  int size() const { return layout_.size(); }
  const WindowLayout& layout() const { return layout_; }

  /// The window of a rank as this rank maps it; valid as long as the fabric, also after its owner
  /// has ended.
  virtual std::byte* window(int rank) const = 0;
  /// The rank's heap as this rank maps it, empty if it has none (transport/shm/heap.h).
  virtual std::span<std::byte> heap(int rank) const = 0;
  /// The state of the rank's process (or thread). A system call: for waits that have lasted a
  /// while. Any thread.
  virtual PeerState peer(int rank) const = 0;
  /// True if the rank's process is known to have ended, even if it left cleanly before. Likewise.
  virtual bool has_ended(int /*rank*/) const { return false; }
  /// True if it is stopped by SIGSTOP or a debugger, as far as can be known. Reads a file. Any
  /// thread.
  virtual bool has_stopped(int /*rank*/) const { return false; }
  /// Describes what else the rank's process does, to follow its last action in this group, or
  /// returns "". `inside`: it was seen in a call of this group. Reads files, and asks the process,
  /// which has `patience` to answer: for messages. Any thread.
  virtual std::string other_activity(int /*rank*/, bool /*inside*/,
                                     std::chrono::milliseconds /*patience*/) const {
    return "";
  }
  /// Sends the question of other_activity() ahead, so that several ranks answer at the same time.
  /// Any thread.
  virtual void inquire(int /*rank*/) const {}
  /// "shm (memfd), 4 ranks in one host" and the like.
  virtual std::string describe() const = 0;

  Header& header(int rank) const { return layout_.header(window(rank)); }

  /// The number of a rank in messages, where these are the ranks of one host of a group of `size`.
  int number(int rank) const {
    return numbers_.empty() ? rank : numbers_[static_cast<std::size_t>(rank)];
  }
  /// True if these are the ranks of one host of a multi-node group.
  bool internode() const { return !numbers_.empty(); }
  int size_of_group() const { return numbers_.empty() ? size() : size_of_group_; }
  /// Call it before the first message. `team` is that of the group.
  void number_as(std::vector<int> numbers, int size, const std::array<std::uint8_t, 16>& team = {});

 protected:
  Fabric(int rank, const WindowLayout& layout) : rank_(rank), layout_(layout) {}

 private:
  int rank_;
  WindowLayout layout_;
  std::vector<int> numbers_;  // empty: their own
  int size_of_group_ = 0;
};

}  // namespace dreamcomm

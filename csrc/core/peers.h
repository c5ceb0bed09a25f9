// Some ranks of a group, as a value.
#pragma once

namespace dreamcomm {

/// Some ranks of the group: all, one, or none.
class Peers {
 public:
  static constexpr Peers all() { return Peers(kAll); }
  static constexpr Peers none() { return Peers(kNone); }
  static constexpr Peers only(int rank) { return Peers(rank); }
  constexpr bool has(int rank) const { return which_ == rank || which_ == kAll; }
  constexpr bool empty() const { return which_ == kNone; }

 private:
  static constexpr int kAll = -1;
  static constexpr int kNone = -2;
  explicit constexpr Peers(int which) : which_(which) {}
  int which_;
};

}  // namespace dreamcomm

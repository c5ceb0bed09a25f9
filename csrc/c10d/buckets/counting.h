// Averages over counts: what the script has counted, and how ranks tell each other.
//
//   count(n), backward    once or several times: the passes' counts add up with the gradients
//   a reduction           gives their sum to the other ranks, and keeps it
//   the next pass         begins anew, once the reduced gradients are cleared
//
// Where the group's calls are this library's, on one host, the counts ride in the opening of the
// first bucket's call. Elsewhere one small call brings them, which is begun with the pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "c10d/buckets/moves/group_calls.h"
#include "core/counts.h"

namespace dreamcomm {

/// A number that the script has counted.
struct Count {
  std::int64_t whole = 0;
  double weight = 0;  // in place of `whole`, if it is no whole number
  bool is_whole = true;
};

class Counting {
 public:
  /// `along_tree`: as GradientCounts.
  explicit Counting(bool along_tree) : along_tree_(along_tree) {}

  /// Before a backward pass.
  void add(const Count& count);
  /// True if gradients were taken for a reduction, which the next pass must not add to.
  bool is_taken() const { return taken_; }
  /// Before the next pass: gradients of earlier ones are there, where begin_pass() does not look.
  void note_kept() { kept_ = true; }
  /// When a backward pass begins. `uncleared`: gradients of earlier passes are there.
  void begin_pass(bool uncleared);
  /// At a pass's end: whether it has left any gradient, by which the next one sees if it is
  /// cleared.
  void end_pass(bool has_gradients) { has_gradients_ = has_gradients; }
  /// Has the next reduction take this count, in place of what the passes have counted.
  void replace(const Count& count);
  /// This rank's count for a reduction of what has accumulated.
  RankCount take();

  /// Begins a reduction; nothing of an earlier one is under way. `rides`: its calls bring the
  /// counts themselves; else one begins here, in the same order of calls.
  std::shared_ptr<GradientCounts> begin_reduction(const GroupPtr& group, c10::Device device,
                                                  RankCount own, bool rides);
  /// Waits for a call that brings counts, and throws where a rank has none. Nothing if they ride.
  void await();

  /// Drops what was counted so far, and is not taken yet.
  void forget();
  /// Also what was counted for the next pass.
  void forget_all() {
    forget();
    pending_.reset();
    twice_ = false;
  }

 private:
  bool along_tree_;
  std::optional<Count> pending_;  // for the next pass
  bool twice_ = false;            // two of them
  std::vector<Count> passes_;     // that the gradients are of
  std::optional<CountFault> fault_;
  bool taken_ = false;  // by a reduction
  bool has_gradients_ = false;
  bool kept_ = false;
  std::shared_ptr<GradientCounts> counts_;
  at::Tensor all_;  // of the ranks, where a call brings them
  WorkPtr work_;
};

}  // namespace dreamcomm

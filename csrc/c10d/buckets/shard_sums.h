// Sums over the shards of a step, along one binary tree of all ranks' shards.
//
//   shard     0   1   2   3   4   5   6   7
//              \ /     \ /     \ /     \ /      within a rank, if it has several
//               +       +       +       +
//                \     /         \     /
//                 +---+           +---+         and over the ranks (Reduction::along_tree)
//                     \           /
//                      +---------+              divided once
//
// A rank adds like a binary counter: it keeps one partial sum for each bit that is set in the
// number of shards done. A gradient that a shard lacks counts as +0. So the bits do not depend on
// the number of ranks, if it divides that of shards, and both are powers of two.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "c10d/buckets/parameter.h"

namespace dreamcomm {

class ShardSums {
 public:
  /// `per_rank`: a rank's shards in each step.
  ShardSums(std::size_t per_rank, std::size_t parameters)
      : per_rank_(per_rank), sums_(parameters), given_(parameters) {}

  /// Each shard begins without a gradient. Gradients that are there are zeros; with `keeps` they
  /// keep their tensors, into which give_back() copies. Throws where one is not zero.
  void begin_step(Parameters& parameters, const std::string& who, bool keeps);
  void begin_shard() { state_ = State::kOpen; }
  /// When a backward pass begins: one for each shard.
  void begin_pass(const std::string& who);
  /// After a pass that does not reduce: its gradients stay as they are until the shard ends.
  static void note_passed(Parameters& parameters) {
    for (Parameter& one : parameters) one.seen.set(one.tensor.grad());
  }
  /// Ends a shard, whose pass has ended. Its gradients are put aside, except those of the last one.
  void end_shard(Parameters& parameters, const std::string& who);
  /// Makes the gradient that of all of this rank's shards, if it is not yet.
  void fold(Parameters& parameters, std::size_t index);
  void fold_all(Parameters& parameters) {
    for (std::size_t i = 0; i < parameters.size(); ++i) fold(parameters, i);
  }
  /// After the sums of all ranks are gradients.
  void give_back(Parameters& parameters);
  /// After the loop, or where the script has left it before its end.
  void leave(Parameters& parameters);
  bool is_last() const { return done_ + 1 == per_rank_; }
  /// True within a step, after its first shard.
  bool has_some() const { return began_ && done_ > 0 && done_ < per_rank_; }
  /// How many shards of a step that has begun have not ended.
  std::size_t missing() const { return began_ ? per_rank_ - done_ : 0; }

 private:
  enum class State : std::uint8_t { kClosed, kOpen, kRan };

  void put_aside(Parameters& parameters);

  const std::size_t per_rank_;
  std::vector<std::vector<at::Tensor>> sums_;  // of each parameter; undefined: all shards lack it
  std::vector<at::Tensor> given_;              // the script's, zeros when the step begins
  std::vector<bool> folded_;
  State state_ = State::kClosed;
  bool began_ = false;
  std::size_t done_ = 0;  // shards of the step
};

}  // namespace dreamcomm

// The ways of data parallelism: a row each, from which all that a bucket does can be read.
//
//   row            parameter    gradient    state        in backward      in a step
//   data parallel  replicated   replicated  replicated   reduce           -
//   ZeRO 1         replicated   local       sharded      -                reduce-scatter, gather
//   ZeRO 2         replicated   sharded     sharded      reduce-scatter   gather
//   ZeRO 3         sharded      sharded     sharded      reduce-scatter   -
//
// With ZeRO 3 a module gathers parameters before it uses them, and keeps its rows afterwards
// (Rajbhandari et al. 2020, "ZeRO", figure 1). A hybrid is a row within a group of ranks and
// another across the groups.
#pragma once

#include <array>

#include "c10d/buckets/placement.h"

namespace dreamcomm {

/// Where a bucket's tensors are between steps: gradients after a backward pass, and what an
/// optimizer keeps and steps.
struct StageRow {
  TensorPlacement parameter = TensorPlacement::kReplicated;
  TensorPlacement gradient = TensorPlacement::kReplicated;
  TensorPlacement state = TensorPlacement::kReplicated;

  /// Autograd leaves gradients local.
  constexpr Move in_backward() const { return move_between(TensorPlacement::kLocal, gradient); }
  /// The move of gradients not reduced yet: an optimizer needs them where its state is.
  constexpr Move of_rest() const { return move_between(TensorPlacement::kLocal, state); }
  constexpr Move before_step() const { return move_between(gradient, state); }
  constexpr Move after_step() const { return move_between(state, parameter); }
  constexpr Move before_use() const {
    return move_between(parameter, TensorPlacement::kReplicated);
  }
  constexpr Move after_use() const { return move_between(TensorPlacement::kReplicated, parameter); }

  /// True if an optimizer steps rows. It then also decides what gradients become.
  constexpr bool is_sharded() const { return state == TensorPlacement::kSharded; }
  /// True if backward passes leave gradients to the step.
  constexpr bool is_deferred() const { return gradient == TensorPlacement::kLocal; }
};

inline constexpr StageRow kDataParallel{};
inline constexpr StageRow kZero1{TensorPlacement::kReplicated, TensorPlacement::kLocal,
                                 TensorPlacement::kSharded};
inline constexpr StageRow kZero2{TensorPlacement::kReplicated, TensorPlacement::kSharded,
                                 TensorPlacement::kSharded};
inline constexpr StageRow kZero3{TensorPlacement::kSharded, TensorPlacement::kSharded,
                                 TensorPlacement::kSharded};

/// By the number of the stage; 0: data parallelism.
inline constexpr std::array kStages{kDataParallel, kZero1, kZero2, kZero3};

}  // namespace dreamcomm

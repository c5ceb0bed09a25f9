// What the rows of the table say that is to be done.
#include "c10d/buckets/table.h"

#include <doctest.h>

namespace dreamcomm {
namespace {

constexpr auto kReplicated = TensorPlacement::kReplicated;
constexpr auto kLocal = TensorPlacement::kLocal;
constexpr auto kSharded = TensorPlacement::kSharded;

TEST_CASE("a move is the difference of two placements") {
  CHECK(move_between(kLocal, kReplicated) == Move::kSum);
  CHECK(move_between(kLocal, kSharded) == Move::kSumRows);
  CHECK(move_between(kSharded, kReplicated) == Move::kGatherRows);
  CHECK(move_between(kReplicated, kSharded) == Move::kKeepRows);
  CHECK(move_between(kReplicated, kLocal) == Move::kNothing);
  for (const TensorPlacement one : {kReplicated, kLocal, kSharded})
    CHECK(move_between(one, one) == Move::kNothing);
}

TEST_CASE("each stage moves what the table says") {
  struct Expected {
    StageRow row;
    Move in_backward, before_step, after_step, before_use, after_use;
  };
  constexpr auto kNone = Move::kNothing;
  constexpr std::array kExpected{
      Expected{kDataParallel, Move::kSum, kNone, kNone, kNone, kNone},
      Expected{kZero1, kNone, Move::kSumRows, Move::kGatherRows, kNone, kNone},
      Expected{kZero2, Move::kSumRows, kNone, Move::kGatherRows, kNone, kNone},
      Expected{kZero3, Move::kSumRows, kNone, kNone, Move::kGatherRows, Move::kKeepRows},
  };
  for (const Expected& one : kExpected) {
    CHECK(one.row.in_backward() == one.in_backward);
    CHECK(one.row.before_step() == one.before_step);
    CHECK(one.row.after_step() == one.after_step);
    CHECK(one.row.before_use() == one.before_use);
    CHECK(one.row.after_use() == one.after_use);
    // What a backward pass and a step do together is what is done of what was not reduced.
    CHECK(one.row.of_rest() == (one.in_backward == kNone ? one.before_step : one.in_backward));
  }
}

TEST_CASE("a hybrid scatters within a group, and reduces across") {
  constexpr MeshPlacement kGradient{kSharded, kReplicated};
  constexpr MeshMoves kMade = moves_between({kLocal, kLocal}, kGradient);
  CHECK(kMade.within == Move::kSumRows);
  CHECK(kMade.across == Move::kSum);
  constexpr MeshMoves kUsed = moves_between(kGradient, {kReplicated, kReplicated});
  CHECK(kUsed.within == Move::kGatherRows);
  CHECK(kUsed.across == Move::kNothing);
}

}  // namespace
}  // namespace dreamcomm

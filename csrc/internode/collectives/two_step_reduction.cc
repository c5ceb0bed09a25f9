#include "internode/collectives/two_step_reduction.h"

#include "core/counts.h"

namespace dreamcomm {
namespace {

/// Halves are rounded once, at the very end. MIN and MAX round nothing, and neither do data
/// movements.
DType wire_of(const Reduction& how, bool widens) {
  const bool half = how.dtype == DType::kFloat16 || how.dtype == DType::kBFloat16;
  const bool exact =
      how.op == ReduceOp::kMin || how.op == ReduceOp::kMax || how.op == ReduceOp::kNone;
  return widens && half && !exact ? DType::kFloat32 : how.dtype;
}

}  // namespace

TwoStepReduction::TwoStepReduction(const Reduction& how, bool widens)
    : type(how.dtype), wire(wire_of(how, widens)), here(how), between(how) {
  here.dtype = between.dtype = wire;
  here.counts = between.counts = nullptr;
  if (how.op == ReduceOp::kAvg) {  // divided once, at the end
    here.op = ReduceOp::kSum;
    here.divisor = 1;
    if (how.counts != nullptr) between.divisor = how.counts->divisor();
  }
  if (how.op == ReduceOp::kPremulSum) between.op = ReduceOp::kSum;  // multiplied once, as it enters
}

}  // namespace dreamcomm

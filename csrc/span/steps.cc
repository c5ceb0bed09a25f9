#include "span/steps.h"

#include "kernels/reduce.h"
#include "kernels/widen.h"

namespace dreamcomm {
namespace {

/// Halves are rounded once, at the very end. MIN and MAX round nothing, as does what only moves.
DType wire_of(const Reduction& how, bool widens) {
  const bool half = how.dtype == DType::kFloat16 || how.dtype == DType::kBFloat16;
  const bool exact =
      how.op == ReduceOp::kMin || how.op == ReduceOp::kMax || how.op == ReduceOp::kNone;
  return widens && half && !exact ? DType::kFloat32 : how.dtype;
}

}  // namespace

Steps::Steps(const Reduction& how, bool widens)
    : type(how.dtype), wire(wire_of(how, widens)), here(how), between(how) {
  here.dtype = between.dtype = wire;
  if (how.op == ReduceOp::kAvg) {  // divided once, at the end
    here.op = ReduceOp::kSum;
    here.divisor = 1;
  }
  if (how.op == ReduceOp::kPremulSum) between.op = ReduceOp::kSum;  // multiplied once, as it enters
}

Cargo Steps::widened(const Trip& trip, std::byte* in, std::size_t count) const {
  if (!widens())
    return {std::shared_ptr<std::byte>(std::shared_ptr<void>(), in), 0, count * item()};
  Cargo wide = trip.room(count * sizeof(float));
  kernels::widen(type, in, reinterpret_cast<float*>(wide.data()), count);
  return wide;
}

void Steps::combine(const Trip& trip, std::span<const std::byte* const> of_hosts, std::byte* out,
                    std::size_t count) const {
  if (!widens()) return reduce(between, of_hosts, out, count);
  const Cargo wide = trip.room(count * sizeof(float));
  reduce(between, of_hosts, wide.data(), count);
  kernels::narrow(type, reinterpret_cast<const float*>(wide.data()), out, count);
}

}  // namespace dreamcomm

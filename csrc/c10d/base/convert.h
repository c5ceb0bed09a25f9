// Torch's types and errors in this library's terms, and back.
#pragma once

#include <c10/core/ScalarType.h>

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "c10d/base/check_args.h"
#include "core/error.h"
#include "core/types.h"

namespace dreamcomm {

/// kOpaque for types that no call tells apart (quantized ones, bits).
DType to_dtype(c10::ScalarType type);

/// "float32", as Python writes it where this library knows the type.
std::string type_name(c10::ScalarType type);

/// How `tensor` is described to a collective that only moves it.
Reduction moving(const at::Tensor& tensor);

/// How an AVG is made, in place of over the ranks from left to right. A c10d::ReduceOp carries it,
/// within this library alone.
struct Averaging final : c10d::_SupplementBase {
  double divisor = 0;                      // 0: the number of ranks
  std::shared_ptr<GradientCounts> counts;  // divide in its place
  bool along_tree = false;                 // as in Reduction
};
c10d::ReduceOp average_by(c10::intrusive_ptr<Averaging> averaging);
/// Sets what a reduction takes of it, or the number of ranks as the divisor.
void set_average(Reduction& how, const c10d::ReduceOp& op, int ranks);

/// SUM, ... with the factor of PREMUL_SUM and the divisor of AVG. Throws
/// c10::ValueError if the operation is not defined on the type.
Reduction to_reduction(const c10d::ReduceOp& op, c10::ScalarType type, const Site& site);

/// `op` on such tensors, as far as accelerators care: without a factor.
Reduction plainly(const c10d::ReduceOp& op, const at::Tensor& tensor, const Site& site);

/// The longest timeout there is: clocks of nanoseconds end after three times as long.
inline constexpr std::chrono::milliseconds kForEver = std::chrono::hours{24} * 36'500;

/// The timeout that was meant: kForEver at most. Torch reads a timedelta as microseconds in 64
/// bits, which wrap around: timedelta.max arrives as one of -184,000 years.
constexpr std::chrono::milliseconds bounded(std::chrono::milliseconds given) {
  return given > kForEver || given < -kForEver ? kForEver : given;
}

/// The deadline of a call: c10d::kUnsetTimeout means `fallback`.
std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout,
                                                     std::chrono::milliseconds fallback);

/// The exception torch shows to Python for `error`: ValueError for the caller's
/// mistakes, DistBackendError for the group's errors.
std::exception_ptr to_torch(const Error& error);

/// The current exception as torch's kind; anything but Error stays as it is.
/// Only inside a catch block.
std::exception_ptr current_as_torch();

/// The operation of that name; throws c10::ValueError.
Kind kind_named(const std::string& wanted);

}  // namespace dreamcomm

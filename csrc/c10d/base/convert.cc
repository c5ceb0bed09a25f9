#include "c10d/base/convert.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <exception>
#include <string_view>
#include <utility>

#include "core/request.h"
#include "kernels/reduce.h"

namespace dreamcomm {
namespace {

ReduceOp to_op(c10d::ReduceOp::RedOpType op, const Site& site) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::kPremulSum;
    case c10d::ReduceOp::UNUSED:
      break;
  }
  TORCH_CHECK_VALUE(false, site, "expected a reduction (SUM, AVG, ...), got op number ",
                    static_cast<int>(op));
}

double premul_factor(const c10d::ReduceOp& op, const Site& site) {
  // The older name: the newer one does not exist before torch 2.13.
  const auto* extra = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(extra != nullptr, site,
                    "PREMUL_SUM needs its factor; make the op with "
                    "torch.distributed._make_nccl_premul_sum(factor)");
  return extra->tensor_factor.defined() ? extra->tensor_factor.item().toDouble()
                                        : extra->double_factor;
}

}  // namespace

DType to_dtype(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Byte:
      return DType::kUInt8;
    case c10::ScalarType::Char:
      return DType::kInt8;
    case c10::ScalarType::UInt16:
      return DType::kUInt16;
    case c10::ScalarType::Short:
      return DType::kInt16;
    case c10::ScalarType::UInt32:
      return DType::kUInt32;
    case c10::ScalarType::Int:
      return DType::kInt32;
    case c10::ScalarType::UInt64:
      return DType::kUInt64;
    case c10::ScalarType::Long:
      return DType::kInt64;
    case c10::ScalarType::Half:
      return DType::kFloat16;
    case c10::ScalarType::BFloat16:
      return DType::kBFloat16;
    case c10::ScalarType::Float:
      return DType::kFloat32;
    case c10::ScalarType::Double:
      return DType::kFloat64;
    case c10::ScalarType::Bool:
      return DType::kBool;
    case c10::ScalarType::ComplexFloat:
      return DType::kComplex64;
    case c10::ScalarType::ComplexDouble:
      return DType::kComplex128;
    case c10::ScalarType::Float8_e5m2:
      return DType::kFloat8E5M2;
    case c10::ScalarType::Float8_e4m3fn:
      return DType::kFloat8E4M3FN;
    case c10::ScalarType::Float8_e5m2fnuz:
      return DType::kFloat8E5M2FNUZ;
    case c10::ScalarType::Float8_e4m3fnuz:
      return DType::kFloat8E4M3FNUZ;
    case c10::ScalarType::Float8_e8m0fnu:
      return DType::kFloat8E8M0FNU;
    case c10::ScalarType::Float4_e2m1fn_x2:
      return DType::kFloat4E2M1FNX2;
    case c10::ScalarType::ComplexHalf:
      return DType::kComplex32;
    default:
      return DType::kOpaque;
  }
}

std::string type_name(c10::ScalarType type) {
  const DType known = to_dtype(type);
  return known == DType::kOpaque ? c10::toString(type) : std::string(name(known));
}

Reduction moving(const at::Tensor& tensor) { return {.dtype = to_dtype(tensor.scalar_type())}; }

Reduction plainly(const c10d::ReduceOp& op, const at::Tensor& tensor, const Site& site) {
  return {.dtype = to_dtype(tensor.scalar_type()), .op = to_op(op.op_, site)};
}

c10d::ReduceOp average_by(c10::intrusive_ptr<Averaging> averaging) {
  c10d::ReduceOp op = c10d::ReduceOp::AVG;
  op.supplement_ = std::move(averaging);
  return op;
}

void set_average(Reduction& how, const c10d::ReduceOp& op, int ranks) {
  how.divisor = ranks;
  const auto* const by = dynamic_cast<const Averaging*>(op.supplement_.get());
  if (by == nullptr) return;
  if (by->divisor > 0) how.divisor = by->divisor;
  how.counts = by->counts.get();
  how.along_tree = by->along_tree;
}

Reduction to_reduction(const c10d::ReduceOp& op, c10::ScalarType type, const Site& site) {
  Reduction reduction{.dtype = to_dtype(type), .op = to_op(op.op_, site)};
  TORCH_CHECK_VALUE(is_defined(reduction.op, reduction.dtype), site, name(reduction.op),
                    " is not defined on tensors of type ", type_name(type));
  if (reduction.op == ReduceOp::kPremulSum) reduction.factor = premul_factor(op, site);
  set_average(reduction, op, site.size);
  try {
    check_defined(reduction);
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, site, error.what());
  }
  return reduction;
}

std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout,
                                                     std::chrono::milliseconds fallback) {
  return deadline_in(Clock::now(), timeout == c10d::kUnsetTimeout ? fallback : bounded(timeout));
}

namespace {

/// Gloo's words about a lost peer: programs that restart ranks search an error's text for it.
constexpr const char* kLost = "Connection closed by peer";

/// True if a rank was lost. The same kind of error reports ranks that never joined a group, as
/// their options differ: a program that restarts ranks for that would do so without end.
bool tells_of_loss(std::string_view text) {
  constexpr std::array kWords =
      std::to_array<std::string_view>({"has ended", "has left the group", "has aborted the group",
                                       "hung up", "connection to rank"});
  return std::ranges::any_of(
      kWords, [&](std::string_view words) { return text.find(words) != std::string_view::npos; });
}

}  // namespace

std::exception_ptr to_torch(const Error& error) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if (error.kind() == ErrorKind::kInvalid) {
    return std::make_exception_ptr(c10::ValueError(here, error.what()));
  }
  std::string text = error.what();
  if (error.kind() == ErrorKind::kTimeout) {
    text += " (if that is only slow, give a longer timeout to the call or to the group)";
  } else if (error.kind() == ErrorKind::kPeerLost && tells_of_loss(text) &&
             text.find(kLost) == std::string::npos) {
    text += concat(" (", kLost, ')');
  }
  return std::make_exception_ptr(c10::DistBackendError(here, std::move(text)));
}

std::exception_ptr current_as_torch() {
  try {
    throw;
  } catch (const Error& error) {
    return to_torch(error);
  } catch (const abi::__forced_unwind&) {
    std::terminate();  // CPython kills this thread: keep_killed_threads() stops it here
  } catch (...) {
    return std::current_exception();
  }
}

Kind kind_named(const std::string& wanted) {
  std::string known;
  for (int k = 0; k < kKinds; ++k) {
    const auto kind = static_cast<Kind>(k);
    if (name(kind) == wanted) return kind;
    known += known.empty() ? "" : ", ";
    known += name(kind);
  }
  TORCH_CHECK_VALUE(false, "unknown operation '", wanted, "'; expected one of ", known);
}

}  // namespace dreamcomm

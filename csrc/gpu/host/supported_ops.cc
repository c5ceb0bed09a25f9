#include "gpu/host/supported_ops.h"

#include "gpu/collectives/formats.h"

namespace dreamcomm::gpu {
namespace {

bool is_computed(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kProduct ||
         op == ReduceOp::kMin || op == ReduceOp::kMax;
}

/// Booleans are bytes of 0 and 1.
ReduceOp op_on_bytes(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kBor:
      return ReduceOp::kMax;
    case ReduceOp::kProduct:
    case ReduceOp::kBand:
      return ReduceOp::kMin;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return op;
    default:
      return ReduceOp::kNone;
  }
}

DType type_of_bits(DType type, ReduceOp op) {
  const bool linear = op == ReduceOp::kSum || op == ReduceOp::kAvg;
  const bool modular = op == ReduceOp::kSum || op == ReduceOp::kProduct;
  switch (type) {
    case DType::kComplex64:
      return linear ? DType::kFloat32 : type;
    case DType::kComplex128:
      return linear ? DType::kFloat64 : type;
    case DType::kUInt16:
      return modular ? DType::kInt16 : type;
    case DType::kUInt32:
      return modular ? DType::kInt32 : type;
    case DType::kUInt64:
      return modular ? DType::kInt64 : type;
    default:
      return type;
  }
}

}  // namespace

std::optional<Reduction> computed_as(const Reduction& wanted) {
  Reduction reduction = wanted;
  if (wanted.dtype == DType::kBool) {
    reduction.dtype = DType::kUInt8;
    reduction.op = op_on_bytes(wanted.op);
  } else {
    reduction.dtype = type_of_bits(wanted.dtype, wanted.op);
  }
  const bool known = with_format(reduction.dtype, [](auto) {});
  if (!known || !is_computed(reduction.op)) return std::nullopt;
  return reduction;
}

}  // namespace dreamcomm::gpu

// The vocabulary every floor shares: element types, reductions, collectives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dreamcomm {

enum class DType : std::uint8_t {
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kComplex64,
  kComplex128,
  kOpaque,  // from here on: moved, never computed with; this one: bytes of any type
  kFloat8E5M2,
  kFloat8E4M3FN,
  kFloat8E5M2FNUZ,
  kFloat8E4M3FNUZ,
  kFloat8E8M0FNU,
  kFloat4E2M1FNX2,  // two in a byte
  kComplex32,
};

/// True if no operation is defined on it.
constexpr bool only_moves(DType t) { return t >= DType::kOpaque; }

enum class ReduceOp : std::uint8_t {
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum,
  kNone,  // collectives that only move data
};

enum class Kind : std::uint8_t {
  kBarrier,
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kSend,
  kRecv,
};
inline constexpr int kKinds = 11;

/// Bytes of one element.
constexpr std::size_t item_size(DType t) {
  switch (t) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool:
    case DType::kOpaque:
    case DType::kFloat8E5M2:
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2FNUZ:
    case DType::kFloat8E4M3FNUZ:
    case DType::kFloat8E8M0FNU:
    case DType::kFloat4E2M1FNX2:
      return 1;
    case DType::kUInt16:
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kUInt32:
    case DType::kInt32:
    case DType::kFloat32:
    case DType::kComplex32:
      return 4;
    case DType::kUInt64:
    case DType::kInt64:
    case DType::kFloat64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

constexpr std::string_view name(DType t) {
  constexpr std::string_view names[] = {"uint8",
                                        "int8",
                                        "uint16",
                                        "int16",
                                        "uint32",
                                        "int32",
                                        "uint64",
                                        "int64",
                                        "float16",
                                        "bfloat16",
                                        "float32",
                                        "float64",
                                        "bool",
                                        "complex64",
                                        "complex128",
                                        "bytes",
                                        "float8_e5m2",
                                        "float8_e4m3fn",
                                        "float8_e5m2fnuz",
                                        "float8_e4m3fnuz",
                                        "float8_e8m0fnu",
                                        "float4_e2m1fn_x2",
                                        "complex32"};
  return names[static_cast<int>(t)];
}

constexpr std::string_view name(ReduceOp op) {
  constexpr std::string_view names[] = {"SUM",  "AVG", "PRODUCT", "MIN",        "MAX",
                                        "BAND", "BOR", "BXOR",    "PREMUL_SUM", "none"};
  return names[static_cast<int>(op)];
}

constexpr std::string_view name(Kind k) {
  constexpr std::string_view names[] = {"barrier",    "broadcast", "all_reduce", "reduce",
                                        "all_gather", "gather",    "scatter",    "reduce_scatter",
                                        "all_to_all", "send",      "recv"};
  return names[static_cast<int>(k)];
}

constexpr bool is_complex(DType t) { return t == DType::kComplex64 || t == DType::kComplex128; }
constexpr bool is_floating(DType t) {
  return t == DType::kFloat16 || t == DType::kBFloat16 || t == DType::kFloat32 ||
         t == DType::kFloat64;
}

/// True if `op` is defined on `t`. Complex numbers have no order, floating-point numbers no bitwise
/// operations, booleans no average, and types that are only moved no operation at all.
constexpr bool is_defined(ReduceOp op, DType t) {
  if (only_moves(t) || op == ReduceOp::kNone) return false;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return true;
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return t != DType::kBool;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !is_complex(t);
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return !is_complex(t) && !is_floating(t);
    case ReduceOp::kNone:
      return false;
  }
  return false;
}

class GradientCounts;  // core/counts.h

/// The operation on the inputs of a reduction, element by element.
/// SUM of booleans is OR and PRODUCT is AND, as they cannot leave {0, 1}.
struct Reduction {
  DType dtype = DType::kOpaque;
  ReduceOp op = ReduceOp::kNone;
  double factor = 1.0;              // PREMUL_SUM: every input is multiplied by it, or, if given,
  const double* factors = nullptr;  // by its own of these (each rank has brought one)
  double divisor = 1;               // AVG: the sum is divided by it (the world size), or, if given,
  GradientCounts* counts = nullptr;  // by the sum of these, which the first call takes
  bool along_tree = false;  // neighbours are added, then their sums; else from left to right
};

}  // namespace dreamcomm

#include "c10d/device/torch_reduce.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include "c10d/base/call_blocks.h"
#include "c10d/device/contiguous.h"
#include "core/error.h"
#include "gpu/host/supported_ops.h"

namespace dreamcomm {
namespace {

at::ScalarType scalar_of(DType type) {
  switch (type) {
    case DType::kUInt8:
      return at::kByte;
    case DType::kInt8:
      return at::kChar;
    case DType::kInt16:
      return at::kShort;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt64:
      return at::kLong;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    default:
      throw Error(ErrorKind::kInvalid, concat("no sums of ", name(type), " on devices"));
  }
}

bool is_half(DType type) { return type == DType::kFloat16 || type == DType::kBFloat16; }

void join(ReduceOp op, at::Tensor& sum, const at::Tensor& one, const at::Tensor& other) {
  switch (op) {
    case ReduceOp::kProduct:
      at::mul_out(sum, one, other);
      return;
    case ReduceOp::kMin:
      at::minimum_out(sum, one, other);
      return;
    case ReduceOp::kMax:
      at::maximum_out(sum, one, other);
      return;
    default:
      at::add_out(sum, one, other);
  }
}

/// By a tensor: torch multiplies by the reciprocal of a number, which rounds otherwise.
void divide(at::Tensor& sum, double divisor) {
  at::Tensor by = at::empty({1}, sum.options());
  by.fill_(divisor);
  if (sum.is_floating_point()) {
    at::div_out(sum, sum, by);
  } else {
    at::div_out(sum, sum, by, "trunc");
  }
}

}  // namespace

void convert_on_device(const Elements& to, const Elements& from, std::size_t count,
                       c10::Device device) {
  if (count == 0) return;
  const at::AutoDispatchBelowAutograd guard;
  tensor_at(to.data, count, scalar_of(to.type), device)
      .copy_(tensor_at(from.data, count, scalar_of(from.type), device));
}

void reduce_on_device(const Reduction& how, std::span<const std::byte* const> from,
                      const Elements& out, std::size_t count, c10::Device device) {
  if (count == 0) return;
  const at::AutoDispatchBelowAutograd guard;
  const Reduction done = gpu::computed_as(how).value();
  count *= item_size(how.dtype) / item_size(done.dtype);  // complex numbers are two each
  const auto source = [&](std::size_t i) {
    return tensor_at(from[i], count, scalar_of(done.dtype), device);
  };
  const bool exact = done.op == ReduceOp::kMin || done.op == ReduceOp::kMax;
  const bool narrows = out.type != how.dtype;
  const at::ScalarType type = scalar_of(narrows ? out.type : done.dtype);
  const at::Tensor result = tensor_at(out.data, count, type, device);
  at::Tensor sum = result;
  if (narrows || (is_half(done.dtype) && !exact)) {
    sum = at::empty({static_cast<std::int64_t>(count)}, result.options().dtype(at::kFloat));
  }
  std::size_t next = 1;
  if (sum.scalar_type() == source(0).scalar_type() && from.size() > 1) {
    join(done.op, sum, source(0), source(next++));
  } else {
    sum.copy_(source(0));
  }
  for (; next < from.size(); ++next) join(done.op, sum, sum, source(next));
  if (done.op == ReduceOp::kAvg) divide(sum, done.divisor);
  if (!sum.is_same(result)) result.copy_(sum);
}

}  // namespace dreamcomm

#include "kernels/bucket.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/inspector.h"
#include "kernels/transfer/transfer.h"

namespace dreamcomm {
namespace {

using kernels::Inspector;
using kernels::Terms;
using kernels::transfer;

void require_packable(DType from, DType to) {
  for (const DType type : {from, to}) {
    check(is_packable(type), ErrorKind::kInvalid,
          "expected elements of type float32, float64, bfloat16 or float16, got ", name(type));
  }
}

/// One tensor, in steps that end where the inspector's blocks end.
void unpack_inspected(const Terms& terms, const std::byte* in, const Target& tensor,
                      Inspector& inspector) {
  for (std::size_t done = 0; done < tensor.count;) {
    const std::size_t n = std::min(inspector.room(), tensor.count - done);
    std::byte* to = tensor.data + done * item_size(terms.to);
    transfer(terms, in + done * item_size(terms.from), to, nullptr, n);
    inspector.add(to, n);
    done += n;
  }
}

}  // namespace

Moved pack(const PackJob& job) {
  require_packable(job.from, job.to);
  const Terms terms{.from = job.from, .to = job.to, .scale = job.scale};
  Moved moved;
  std::size_t at = 0;
  for (const Source& tensor : job.tensors) {
    float* residual = job.residual == nullptr ? nullptr : job.residual + at;
    transfer(terms, tensor.data, job.out + at * item_size(job.to), residual, tensor.count);
    const std::size_t carried = residual == nullptr ? 0 : tensor.count * sizeof(float);
    moved.read += tensor.count * item_size(job.from) + carried;
    moved.written += tensor.count * item_size(job.to) + carried;
    at += tensor.count;
  }
  return moved;
}

Unpacked unpack(const UnpackJob& job) {
  require_packable(job.from, job.to);
  check(job.divisor >= 1, ErrorKind::kInvalid, "expected a divisor of at least 1, got ",
        job.divisor);
  const Terms terms{
      .from = job.from, .to = job.to, .scale = job.factor, .divisor = double(job.divisor)};
  Unpacked result;
  Inspector inspector(job.to);
  const std::byte* in = job.in;
  for (const Target& tensor : job.tensors) {
    if (job.inspect) {
      unpack_inspected(terms, in, tensor, inspector);
    } else {
      transfer(terms, in, tensor.data, nullptr, tensor.count);
    }
    in += tensor.count * item_size(job.from);
    result.moved.read += tensor.count * item_size(job.from);
    result.moved.written += tensor.count * item_size(job.to);
  }
  if (job.inspect) {
    inspector.finish();
    result.squares = inspector.squares();
    result.finite = inspector.finite();
  }
  return result;
}

}  // namespace dreamcomm

// One tensor's elements from one type to another, with arithmetic in between. Every
// type is packable: bucket.h.
#pragma once

#include <cstddef>

#include "core/types.h"

namespace dreamcomm::kernels {

struct Terms {
  DType from;
  DType to;
  double scale = 1.0;
  double divisor = 1.0;  // stays 1 where there is a residual
};

/// out[i] = in[i] / divisor * scale; or with a residual, which may be null,
/// as PackJob says.
void transfer(const Terms& terms, const std::byte* in, std::byte* out, float* residual,
              std::size_t count);

/// The same in one loop, for float32 and bfloat16 on either side.
void transfer_fused(const Terms& terms, const std::byte* in, std::byte* out, float* residual,
                    std::size_t count);

/// The same for all types: a block at a time is widened, computed with and narrowed,
/// which takes three loops over the L1 cache.
void transfer_staged(const Terms& terms, const std::byte* in, std::byte* out, float* residual,
                     std::size_t count);

}  // namespace dreamcomm::kernels

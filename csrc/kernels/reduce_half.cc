// float16 and bfloat16, accumulated in float32.
#include "kernels/families.h"
#include "kernels/reduce_real.h"

namespace dreamcomm::kernels {

void reduce_half(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  if (how.dtype == DType::kFloat16) return reduce_real<2, Float16>(how, in, out, count);
  reduce_real<2, BFloat16>(how, in, out, count);
}

}  // namespace dreamcomm::kernels

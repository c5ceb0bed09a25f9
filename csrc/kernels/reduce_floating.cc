// float32, float64 and the complex numbers made of them.
#include "kernels/families.h"
#include "kernels/reduce_real.h"

namespace dreamcomm::kernels {

void reduce_floating(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  if (how.dtype == DType::kFloat32) return reduce_real<4, Real<float>>(how, in, out, count);
  reduce_real<4, Real<double>>(how, in, out, count);
}

/// Both components are plain numbers, except in the product, which mixes them.
void reduce_complex(const Reduction& how, Operands in, std::byte* out, std::size_t count) {
  const bool is_single = how.dtype == DType::kComplex64;
  if (how.op == ReduceOp::kProduct) {
    if (is_single) return fold_unfused<2>(ComplexProduct<float>(), in, out, count);
    return fold_unfused<2>(ComplexProduct<double>(), in, out, count);
  }
  Reduction component = how;
  component.dtype = is_single ? DType::kFloat32 : DType::kFloat64;
  reduce_floating(component, in, out, 2 * count);
}

}  // namespace dreamcomm::kernels

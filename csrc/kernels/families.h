// reduce() for one family of element types each. The arguments are valid, and
// the operation is defined on the type.
#pragma once

#include <cstddef>

#include "core/types.h"
#include "kernels/fold.h"

namespace dreamcomm::kernels {

void reduce_integer(const Reduction& how, Operands in, std::byte* out, std::size_t count);
void reduce_half(const Reduction& how, Operands in, std::byte* out, std::size_t count);
void reduce_floating(const Reduction& how, Operands in, std::byte* out, std::size_t count);
void reduce_complex(const Reduction& how, Operands in, std::byte* out, std::size_t count);
void reduce_bool(const Reduction& how, Operands in, std::byte* out, std::size_t count);

}  // namespace dreamcomm::kernels

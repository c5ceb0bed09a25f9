// Elements of any packable type to the type they are computed in, and back.
#pragma once

#include <cstddef>

#include "core/types.h"

namespace dreamcomm::kernels {

/// A is float or double, and holds every value of `from`.
template <typename A>
void widen(DType from, const std::byte* in, A* out, std::size_t count);

/// Rounds once, to nearest even. Every NaN among `in` is the quiet one.
template <typename A>
void narrow(DType to, const A* in, std::byte* out, std::size_t count);

}  // namespace dreamcomm::kernels

// Arrays of float16 to float32 and back by the machine's own conversions. The compiler
// makes no vectors of such conversions by itself.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dreamcomm::kernels {

/// True if the machine has such conversions; else the two below convert one by one.
bool converts_halves();

/// Exact.
void widen_halves(const std::uint16_t* from, float* to, std::size_t count);

/// Rounds to nearest even. Every NaN among `from` becomes the quiet NaN that the kernels write.
void narrow_to_halves(const float* from, std::uint16_t* to, std::size_t count);

}  // namespace dreamcomm::kernels

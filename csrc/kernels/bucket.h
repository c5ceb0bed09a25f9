// Many tensors into one flat buffer and back, scaled and cast in the same pass.
//
// The element types are float32, float64, bfloat16 and float16, in any pair. The
// arithmetic is float32's, or float64's if either side is float64, and is rounded
// once, to nearest even. A NaN becomes the quiet one. Elements go through the same
// operations whatever their place, the vectors and the cuts into tensors: equal
// inputs give equal bits. Pointers need no alignment beyond the element's own. A tensor
// may lie at its own place in the buffer if both have the same type; else no memory
// that is written overlaps any other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/types.h"

namespace dreamcomm {

/// A tensor to be read: `count` elements in a row.
struct Source {
  const std::byte* data = nullptr;
  std::size_t count = 0;
};

/// A tensor to be written.
struct Target {
  std::byte* data = nullptr;
  std::size_t count = 0;
};

/// out[i] = x[i] * scale, where x are the tensors one after another. With a residual, the rounding
/// error is carried to the next call:
///   v = x[i] * scale + residual[i];  out[i] = v;  residual[i] = v - out[i]
/// If that difference is not finite, the residual becomes 0.
struct PackJob {
  std::span<const Source> tensors = {};
  std::byte* out = nullptr;
  DType from = DType::kFloat32;  // of the tensors
  DType to = DType::kFloat32;    // of `out`
  double scale = 1.0;
  float* residual = nullptr;  // as many as `out` has; null: none
};

/// x[i] = in[i] / divisor * factor.
struct UnpackJob {
  const std::byte* in = nullptr;
  std::span<const Target> tensors = {};
  DType from = DType::kFloat32;  // of `in`
  DType to = DType::kFloat32;    // of the tensors
  int divisor = 1;
  double factor = 1.0;
  bool inspect = false;  // fills in the last two fields of Unpacked
};

/// Bytes of tensors, buffers and residuals, counted on the way.
struct Moved {
  std::uint64_t read = 0;
  std::uint64_t written = 0;
};

struct Unpacked {
  Moved moved;
  double squares = 0.0;  // the sum of the squares of all x[i] as written, in a fixed order
  bool finite = true;    // no x[i] is infinite or NaN
};

/// True if pack() and unpack() know the type.
constexpr bool is_packable(DType t) { return is_floating(t); }

/// Throws Error(kInvalid) if an element type is not packable.
Moved pack(const PackJob& job);

/// Throws Error(kInvalid) if an element type is not packable, or the divisor below 1.
Unpacked unpack(const UnpackJob& job);

}  // namespace dreamcomm

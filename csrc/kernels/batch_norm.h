// Sums and gradients of batch norm over the rows of several ranks.
#pragma once

#include <cstddef>

#include "core/types.h"

namespace dreamcomm {

/// The statistics of some rows, of each channel.
struct RowStatistics {
  double count = 0;  // of rows
  double* means = nullptr;
  double* squares = nullptr;  // sums of the squared deviations from the mean
};

/// Takes other rows in (Chan, Golub, LeVeque 1983). Without rows it changes nothing.
void join(RowStatistics& into, double count, const double* means, const double* squares,
          std::size_t channels);

/// dx = scale * (dy - shift - (x - mean) * slope). The numbers are those of one channel, or of
/// each element's own.
template <typename A>
struct InputGradient {
  const A* scale = nullptr;
  const A* shift = nullptr;
  const A* mean = nullptr;
  const A* slope = nullptr;
  bool of_each = false;
};

/// `dy`, `x` and `dx` have `count` elements of `type` in a row, which may be packed
/// (kernels/bucket.h). A is float, or double for float64. 16 bits are computed in float32 and
/// rounded once.
template <typename A>
void input_gradient(const InputGradient<A>& how, DType type, const std::byte* dy,
                    const std::byte* x, std::byte* dx, std::size_t count);

}  // namespace dreamcomm

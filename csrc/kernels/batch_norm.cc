#include "kernels/batch_norm.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "kernels/vectors.h"
#include "kernels/widen.h"

namespace dreamcomm {
namespace {

constexpr std::size_t kBlock = 256;  // elements of 16 bits that wait in float32

template <typename A>
void of_channel(const InputGradient<A>& how, const A* dy, const A* x, A* dx, std::size_t count) {
  const A scale = *how.scale;
  const A shift = *how.shift;
  const A mean = *how.mean;
  const A slope = *how.slope;
  kernels::run_simd([=] {
    for (std::size_t i = 0; i < count; ++i) dx[i] = scale * (dy[i] - shift - (x[i] - mean) * slope);
  });
}

template <typename A>
void of_channels(const InputGradient<A>& how, const A* dy, const A* x, A* dx, std::size_t count) {
  kernels::run_simd([=] {
    for (std::size_t i = 0; i < count; ++i)
      dx[i] = how.scale[i] * (dy[i] - how.shift[i] - (x[i] - how.mean[i]) * how.slope[i]);
  });
}

template <typename A>
void compute(const InputGradient<A>& how, const A* dy, const A* x, A* dx, std::size_t count) {
  if (how.of_each) {
    of_channels(how, dy, x, dx, count);
  } else {
    of_channel(how, dy, x, dx, count);
  }
}

template <typename A>
InputGradient<A> from(const InputGradient<A>& how, std::size_t begin) {
  if (!how.of_each) return how;
  return {how.scale + begin, how.shift + begin, how.mean + begin, how.slope + begin, true};
}

}  // namespace

void join(RowStatistics& into, double count, const double* means, const double* squares,
          std::size_t channels) {
  if (count == 0) return;
  const double total = into.count + count;
  for (std::size_t c = 0; c < channels; ++c) {
    const double step = means[c] - into.means[c];
    into.means[c] += step * (count / total);
    into.squares[c] += squares[c] + step * step * (into.count * count / total);
  }
  into.count = total;
}

template <typename A>
void input_gradient(const InputGradient<A>& how, DType type, const std::byte* dy,
                    const std::byte* x, std::byte* dx, std::size_t count) {
  if (type == (std::is_same_v<A, double> ? DType::kFloat64 : DType::kFloat32)) {
    return compute(how, reinterpret_cast<const A*>(dy), reinterpret_cast<const A*>(x),
                   reinterpret_cast<A*>(dx), count);
  }
  alignas(64) std::array<A, kBlock> gradients;
  alignas(64) std::array<A, kBlock> inputs;
  const std::size_t size = item_size(type);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t n = std::min(kBlock, count - begin);
    kernels::widen(type, dy + begin * size, gradients.data(), n);
    kernels::widen(type, x + begin * size, inputs.data(), n);
    compute(from(how, begin), gradients.data(), inputs.data(), gradients.data(), n);
    kernels::narrow(type, gradients.data(), dx + begin * size, n);
  }
}

template void input_gradient(const InputGradient<float>&, DType, const std::byte*, const std::byte*,
                             std::byte*, std::size_t);
template void input_gradient(const InputGradient<double>&, DType, const std::byte*,
                             const std::byte*, std::byte*, std::size_t);

}  // namespace dreamcomm

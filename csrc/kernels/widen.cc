#include "kernels/widen.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/half.h"
#include "kernels/convert_half.h"
#include "kernels/vectors.h"

namespace dreamcomm::kernels {
namespace {

constexpr std::size_t kBlock = 256;  // elements that wait in float32 for their second step

/// out[i] = convert(in[i]).
template <typename From, typename To, typename Convert>
void convert_each(const From* in, To* out, std::size_t count, const Convert& convert) {
  run_simd([=] {
    for (std::size_t i = 0; i < count; ++i) out[i] = convert(in[i]);
  });
}

/// From or to float16 by way of float32, a block at a time.
template <typename Use>
void by_blocks(std::size_t count, const Use& use) {
  alignas(64) std::array<float, kBlock> single;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    use(single.data(), begin, std::min(kBlock, count - begin));
  }
}

void widen_float16(const std::uint16_t* in, float* out, std::size_t count) {
  widen_halves(in, out, count);
}

void widen_float16(const std::uint16_t* in, double* out, std::size_t count) {
  by_blocks(count, [=](float* single, std::size_t begin, std::size_t n) {
    widen_halves(in + begin, single, n);
    convert_each(single, out + begin, n, [](float x) { return static_cast<double>(x); });
  });
}

void narrow_float16(const float* in, std::uint16_t* out, std::size_t count) {
  narrow_to_halves(in, out, count);
}

void narrow_float16(const double* in, std::uint16_t* out, std::size_t count) {
  by_blocks(count, [=](float* single, std::size_t begin, std::size_t n) {
    convert_each(in + begin, single, n, [](double x) { return round_to_odd(x); });
    narrow_to_halves(single, out + begin, n);
  });
}

std::uint16_t to_bfloat16(float value) { return float_to_bfloat16(value); }
std::uint16_t to_bfloat16(double value) { return float_to_bfloat16(round_to_odd(value)); }

}  // namespace

template <typename A>
void widen(DType from, const std::byte* in, A* out, std::size_t count) {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(in);
  const auto cast = [](auto x) { return static_cast<A>(x); };
  switch (from) {
    case DType::kFloat32:
      return convert_each(reinterpret_cast<const float*>(in), out, count, cast);
    case DType::kFloat64:
      return convert_each(reinterpret_cast<const double*>(in), out, count, cast);
    case DType::kBFloat16:
      return convert_each(halves, out, count,
                          [](std::uint16_t x) { return static_cast<A>(bfloat16_to_float(x)); });
    case DType::kFloat16:
      return widen_float16(halves, out, count);
    default:
      return;  // not packable; pack() and unpack() have checked
  }
}

template <typename A>
void narrow(DType to, const A* in, std::byte* out, std::size_t count) {
  auto* halves = reinterpret_cast<std::uint16_t*>(out);
  switch (to) {
    case DType::kFloat32:
      return convert_each(in, reinterpret_cast<float*>(out), count,
                          [](A x) { return static_cast<float>(x); });
    case DType::kFloat64:
      return convert_each(in, reinterpret_cast<double*>(out), count,
                          [](A x) { return static_cast<double>(x); });
    case DType::kBFloat16:
      return convert_each(in, halves, count, [](A x) { return to_bfloat16(x); });
    case DType::kFloat16:
      return narrow_float16(in, halves, count);
    default:
      return;  // not packable; pack() and unpack() have checked
  }
}

template void widen(DType, const std::byte*, float*, std::size_t);
template void widen(DType, const std::byte*, double*, std::size_t);
template void narrow(DType, const float*, std::byte*, std::size_t);
template void narrow(DType, const double*, std::byte*, std::size_t);

}  // namespace dreamcomm::kernels

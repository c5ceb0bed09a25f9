#include "kernels/inspector.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/vectors.h"
#include "kernels/widen.h"

namespace dreamcomm::kernels {
namespace {

constexpr std::size_t kLanes = Inspector::kLanes;

/// Adds the halves of a row of a power of two of numbers, until one is left.
template <std::size_t kCount>
double add_in_pairs(std::array<double, kCount> values) {
  for (std::size_t half = kCount / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

template <typename T>
double add_squares(const T* x, std::size_t count) {
  std::array<double, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t l = 0; l < kLanes; ++l) {
      const auto value = static_cast<double>(x[i + l]);
      lanes[l] += value * value;
    }
  }
  for (std::size_t l = 0; i + l < count; ++l) {
    const auto value = static_cast<double>(x[i + l]);
    lanes[l] += value * value;
  }
  return add_in_pairs(lanes);
}

template <typename T>
double sum_of_squares(const T* x, std::size_t count) {
  double sum = 0.0;
  run_simd([x, count, &sum] { sum = add_squares(x, count); });
  return sum;
}

bool all_finite(const double* x, std::size_t count) {
  return std::all_of(x, x + count, [](double value) { return std::isfinite(value); });
}

}  // namespace

void Inspector::add(const std::byte* data, std::size_t count) {
  if (pending_ == 0 && count == kBlock) return take(data, count);
  std::memcpy(block_.data() + pending_ * item_, data, count * item_);
  pending_ += count;
  if (pending_ == kBlock) finish();
}

double Inspector::squares() const { return add_in_pairs(columns_); }

void Inspector::finish() {
  if (pending_ > 0) take(block_.data(), pending_);
  pending_ = 0;
}

void Inspector::take(const std::byte* block, std::size_t count) {
  double sum = 0.0;
  if (type_ == DType::kFloat64) {
    const auto* wide = reinterpret_cast<const double*>(block);
    sum = sum_of_squares(wide, count);
    // Squares of large finite numbers overflow; of narrower types they do not.
    if (!std::isfinite(sum)) finite_ = finite_ && all_finite(wide, count);
  } else if (type_ == DType::kFloat32) {
    sum = sum_of_squares(reinterpret_cast<const float*>(block), count);
    finite_ = finite_ && std::isfinite(sum);
  } else {
    alignas(64) std::array<float, kBlock> wide;
    widen(type_, block, wide.data(), count);
    sum = sum_of_squares(wide.data(), count);
    finite_ = finite_ && std::isfinite(sum);
  }
  columns_[blocks_++ % kColumns] += sum;
}

double sum_of_squares(DType type, const std::byte* data, std::size_t count) {
  Inspector inspector(type);
  while (count > 0) {
    const std::size_t some = std::min(count, inspector.room());
    inspector.add(data, some);
    data += some * item_size(type);
    count -= some;
  }
  inspector.finish();
  return inspector.squares();
}

}  // namespace dreamcomm::kernels

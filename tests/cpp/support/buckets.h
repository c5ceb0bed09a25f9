// Elements and tensors for tests of buckets.
#pragma once

#include <doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/half.h"
#include "kernels/bucket.h"

namespace dreamcomm::testing {

using Buffer = std::vector<std::byte>;
inline constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16,
                                   DType::kFloat16};
inline constexpr std::size_t kCounts[] = {0, 1, 2, 15, 16, 17, 511, 1023, 1024, 1025, 5000};

template <typename T>
T load(const Buffer& from, std::size_t i) {
  T value;
  std::memcpy(&value, from.data() + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(Buffer& to, std::size_t i, T value) {
  std::memcpy(to.data() + i * sizeof(T), &value, sizeof(T));
}

inline double read(DType type, const Buffer& from, std::size_t i) {
  switch (type) {
    case DType::kFloat32:
      return load<float>(from, i);
    case DType::kFloat64:
      return load<double>(from, i);
    case DType::kBFloat16:
      return bfloat16_to_float(load<std::uint16_t>(from, i));
    default:
      return float16_to_float(load<std::uint16_t>(from, i));
  }
}

/// The nearest number with `digits` binary digits and no bit below 2^least, by the
/// rounding of whole numbers; infinite from 2^top on.
inline double nearest(double value, int digits, int least, int top) {
  if (!std::isfinite(value) || value == 0) return value;
  const int unit = std::max(std::ilogb(value) + 1 - digits, least);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  return std::fabs(rounded) < std::ldexp(1.0, top)
             ? rounded
             : std::copysign(std::numeric_limits<double>::infinity(), value);
}

/// Rounds once. The value of a 16-bit type is exact as float, which gives the bits.
inline void write(DType type, Buffer& to, std::size_t i, double value) {
  switch (type) {
    case DType::kFloat32:
      return store(to, i, value != value ? std::numeric_limits<float>::quiet_NaN() : float(value));
    case DType::kFloat64:
      return store(to, i, value != value ? std::numeric_limits<double>::quiet_NaN() : value);
    case DType::kBFloat16:
      return store(to, i, float_to_bfloat16(float(nearest(value, 8, -133, 128))));
    default:
      return store(to, i, float_to_float16(float(nearest(value, 11, -24, 16))));
  }
}

/// Random bits in half of the elements, numbers near 1 in the others.
inline Buffer random_elements(DType type, std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  Buffer data(count * item_size(type));
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 2 == 0) {
      write(type, data, i, std::normal_distribution<double>()(random));
      continue;
    }
    const std::uint64_t bits = random();
    std::memcpy(data.data() + i * item_size(type), &bits, item_size(type));
  }
  return data;
}

/// Numbers that are finite, and whose squares are.
inline Buffer tame_elements(DType type, std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Buffer data(count * item_size(type));
  for (std::size_t i = 0; i < count; ++i) {
    write(type, data, i, std::normal_distribution<double>()(random));
  }
  return data;
}

/// Cuts `count` elements at random places, some of them twice: empty tensors.
inline std::vector<std::size_t> random_cuts(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::size_t> counts;
  for (std::size_t rest = count; rest > 0;) {
    const std::size_t most = random() % 4 == 0 ? rest : std::min<std::size_t>(rest, 7);
    counts.push_back(random() % (most + 1));
    rest -= counts.back();
  }
  counts.push_back(0);
  return counts;
}

/// The parts of `data`, each in memory of its own; with a skew of so many elements they are not
/// aligned to a vector.
class Tensors {
 public:
  Tensors(DType type, const Buffer& data, const std::vector<std::size_t>& counts,
          std::size_t skew = 1)
      : skipped_(skew * item_size(type)), counts_(counts) {
    const std::size_t item = item_size(type);
    std::size_t at = 0;
    for (const std::size_t count : counts) {
      Buffer& part = parts_.emplace_back(count * item + skipped_);
      if (count > 0) std::memcpy(part.data() + skipped_, data.data() + at, count * item);
      at += count * item;
    }
  }
  std::vector<Source> sources() const {
    std::vector<Source> found;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      found.push_back({parts_[i].data() + skipped_, counts_[i]});
    }
    return found;
  }
  std::vector<Target> targets() {
    std::vector<Target> found;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      found.push_back({parts_[i].data() + skipped_, counts_[i]});
    }
    return found;
  }
  Buffer joined() const {
    Buffer all;
    for (const Buffer& part : parts_) {
      all.insert(all.end(), part.begin() + static_cast<std::ptrdiff_t>(skipped_), part.end());
    }
    return all;
  }

 private:
  std::size_t skipped_;  // bytes
  std::vector<std::size_t> counts_;
  std::vector<Buffer> parts_;
};

template <typename Visit>
void for_each_pair(Visit visit) {
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      CAPTURE(name(from));
      CAPTURE(name(to));
      visit(from, to);
    }
  }
}

}  // namespace dreamcomm::testing

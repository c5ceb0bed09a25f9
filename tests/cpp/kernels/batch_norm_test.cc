#include "kernels/batch_norm.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/half.h"
#include "doctest.h"

using namespace dreamcomm;

namespace {

double element(std::size_t i, double step) { return std::sin(step * static_cast<double>(i + 1)); }

template <typename A>
struct Numbers {
  std::vector<A> scale, shift, mean, slope;

  explicit Numbers(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      scale.push_back(static_cast<A>(1 + element(i, 0.3)));
      shift.push_back(static_cast<A>(element(i, 0.7)));
      mean.push_back(static_cast<A>(element(i, 1.1)));
      slope.push_back(static_cast<A>(element(i, 1.3)));
    }
  }
  InputGradient<A> at(std::size_t i, bool of_each) const {
    return {&scale[i], &shift[i], &mean[i], &slope[i], of_each};
  }
};

template <typename A>
A expected(const Numbers<A>& numbers, std::size_t channel, A dy, A x) {
  return numbers.scale[channel] *
         (dy - numbers.shift[channel] - (x - numbers.mean[channel]) * numbers.slope[channel]);
}

/// Each element, by one channel's numbers and by each one's own.
template <typename A>
void check_wide(DType type, std::size_t count) {
  const Numbers<A> numbers(count);
  std::vector<A> dy, x;
  for (std::size_t i = 0; i < count; ++i) {
    dy.push_back(static_cast<A>(element(i, 0.9)));
    x.push_back(static_cast<A>(element(i, 0.4)));
  }
  for (const bool of_each : {false, true}) {
    std::vector<A> dx(count);
    input_gradient(numbers.at(0, of_each), type, reinterpret_cast<const std::byte*>(dy.data()),
                   reinterpret_cast<const std::byte*>(x.data()),
                   reinterpret_cast<std::byte*>(dx.data()), count);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i)
      wrong += dx[i] == expected(numbers, of_each ? i : 0, dy[i], x[i]) ? 0 : 1;
    CHECK(wrong == 0);
  }
}

using Read = float (*)(std::uint16_t);
using Write = std::uint16_t (*)(float);

void check_half(DType type, Read read, Write write, std::size_t count) {
  const Numbers<float> numbers(count);
  std::vector<std::uint16_t> dy, x;
  for (std::size_t i = 0; i < count; ++i) {
    dy.push_back(write(static_cast<float>(element(i, 0.9))));
    x.push_back(write(static_cast<float>(element(i, 0.4))));
  }
  for (const bool of_each : {false, true}) {
    std::vector<std::uint16_t> dx(count);
    input_gradient(numbers.at(0, of_each), type, reinterpret_cast<const std::byte*>(dy.data()),
                   reinterpret_cast<const std::byte*>(x.data()),
                   reinterpret_cast<std::byte*>(dx.data()), count);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float exact = expected(numbers, of_each ? i : 0, read(dy[i]), read(x[i]));
      wrong += dx[i] == write(exact) ? 0 : 1;
    }
    CHECK(wrong == 0);
  }
}

}  // namespace

TEST_CASE("the gradient of batch norm's input is that of the formula in every type") {
  for (const std::size_t count : {1U, 7U, 256U, 1000U}) {
    check_wide<float>(DType::kFloat32, count);
    check_wide<double>(DType::kFloat64, count);
    check_half(DType::kBFloat16, bfloat16_to_float, float_to_bfloat16, count);
    check_half(DType::kFloat16, float16_to_float, float_to_float16, count);
  }
}

TEST_CASE("statistics of several parts are those of all rows") {
  const std::vector<std::vector<double>> parts{{1.5, -2.0, 4.0}, {}, {1000.0}, {3.0, 3.5}};
  std::array<double, 1> means{};
  std::array<double, 1> squares{};
  RowStatistics joined{0, means.data(), squares.data()};
  double sum = 0;
  double all = 0;
  for (const auto& part : parts) {
    double total = 0;
    for (const double one : part) total += one;
    const auto count = static_cast<double>(part.size());
    const double mean = part.empty() ? 0 : total / count;
    double deviations = 0;
    for (const double one : part) deviations += (one - mean) * (one - mean);
    join(joined, count, &mean, &deviations, 1);
    sum += total;
    all += count;
  }
  double deviations = 0;
  for (const auto& part : parts)
    for (const double one : part) deviations += std::pow(one - sum / all, 2);
  CHECK(joined.count == all);
  CHECK(means[0] == doctest::Approx(sum / all).epsilon(1e-14));
  CHECK(squares[0] == doctest::Approx(deviations).epsilon(1e-14));
}

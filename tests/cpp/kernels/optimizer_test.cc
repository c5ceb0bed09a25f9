#include "kernels/optimizer/optimizer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <variant>
#include <vector>

#include "core/error.h"
#include "cpp/support/buckets.h"
#include "kernels/optimizer/steps.h"

using namespace dreamcomm;
using namespace dreamcomm::testing;

namespace {

constexpr std::size_t kRows = 5;  // parameter, gradient, three states

template <typename T>
T quiet(T value) {
  return value != value ? std::numeric_limits<T>::quiet_NaN() : value;
}

/// The rows of a step, each in memory of its own and beginning at its second element.
struct Model {
  Model(DType of, std::size_t elements, bool tame = false) : type(of), count(elements) {
    for (std::size_t r = 0; r < kRows; ++r) {
      const auto make = tame ? tame_elements : random_elements;
      rows[r] = make(type, count + 1, static_cast<unsigned>(r + 1));
      for (std::size_t i = 0; i <= count; ++i) {
        const double value = read(type, rows[r], i);
        write(type, rows[r], i, r >= 3 ? std::abs(value) : value);  // squares are not negative
      }
    }
  }
  std::byte* at(std::size_t row, std::size_t i) {
    return rows[row].data() + (i + 1) * item_size(type);
  }
  OptimizerMemory memory(std::size_t begin) {
    return {.parameter = at(0, begin), .state = {at(2, begin), at(3, begin), at(4, begin)}};
  }
  void step(const OptimizerRule& rule, std::size_t begin, std::size_t end) {
    optimizer_step(rule, type, memory(begin), at(1, begin), end - begin);
  }
  void step_at(kernels::Vectors level, const OptimizerRule& rule) {
    const kernels::StepRows all{memory(0), at(1, 0), count};
    if (const auto* adam = std::get_if<AdamRule>(&rule)) {
      return kernels::adam_step(level, *adam, type, all);
    }
    kernels::sgd_step(level, std::get<SgdRule>(rule), type, all);
  }

  DType type;
  std::size_t count;
  std::array<Buffer, kRows> rows;
};

void twice_the_roots(DType type, std::byte* data, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (type == DType::kFloat32) {
      reinterpret_cast<float*>(data)[i] = 2 * std::sqrt(reinterpret_cast<float*>(data)[i]);
    } else {
      reinterpret_cast<double*>(data)[i] = 2 * std::sqrt(reinterpret_cast<double*>(data)[i]);
    }
  }
}

AdamRule adam(double beta1) {
  return {.lerp_weight = 1 - beta1,
          .beta2 = 0.999,
          .square_weight = 1 - 0.999,
          .bias_correction2_sqrt = std::sqrt(1 - 0.999 * 0.999),
          .eps = 1e-8,
          .step_size = 1e-3 / (1 - beta1 * beta1)};
}

/// One of each loop that there is.
std::vector<OptimizerRule> rules() {
  std::vector<OptimizerRule> all;
  for (int bits = 0; bits < 16; ++bits) {
    AdamRule rule = adam((bits & 1) != 0 ? 0.9 : 0.3);
    rule.amsgrad = (bits & 2) != 0;
    rule.maximize = (bits & 2) != 0;
    (bits & 4) != 0 ? rule.weight_decay = 0.01 : rule.decay = 1 - 1e-3 * 0.01;
    if ((bits & 8) != 0) rule.roots = &twice_the_roots;
    all.emplace_back(rule);
    all.emplace_back(SgdRule{.lr = 0.1,
                             .weight_decay = (bits & 1) != 0 ? 0.01 : 0,
                             .momentum = (bits & 2) != 0 ? 0.9 : 0,
                             .dampening = 0.2,
                             .nesterov = (bits & 4) != 0,
                             .maximize = (bits & 1) != 0,
                             .first = (bits & 8) != 0});
  }
  return all;
}

template <typename Use>
void for_each_rule(const Use& use) {
  for (const DType type : {DType::kFloat32, DType::kFloat64}) {
    for (const OptimizerRule& rule : rules()) use(type, rule);
  }
}

/// One element of Adam, in plain C++.
template <typename T>
void naive_adam(const AdamRule& rule, T& parameter, T gradient, T& average, T& square, T& largest) {
  if (rule.maximize) gradient = -gradient;
  parameter *= T(rule.decay);
  if (rule.weight_decay != 0) gradient = std::fma(T(rule.weight_decay), parameter, gradient);
  const T weight = T(rule.lerp_weight);
  average = weight < T(0.5) ? std::fma(weight, gradient - average, average)
                            : std::fma(weight - 1, gradient - average, gradient);
  square = std::fma(T(rule.square_weight) * gradient, gradient, square * T(rule.beta2));
  if (std::isnan(square) || square > largest) largest = square;
  T root = std::sqrt(rule.amsgrad ? largest : square);
  if (rule.roots != nullptr) root *= 2;
  const volatile T denominator = root / T(rule.bias_correction2_sqrt) + T(rule.eps);
  const volatile T change = T(-rule.step_size) * average / denominator;
  parameter += change;
}

template <typename T>
void naive_sgd(const SgdRule& rule, T& parameter, T gradient, T& buffer) {
  if (rule.maximize) gradient = -gradient;
  if (rule.weight_decay != 0) gradient = std::fma(T(rule.weight_decay), parameter, gradient);
  if (rule.momentum != 0) {
    buffer = rule.first ? gradient
                        : std::fma(T(1 - rule.dampening), gradient, T(buffer * T(rule.momentum)));
    gradient = rule.nesterov ? std::fma(T(rule.momentum), buffer, gradient) : buffer;
  }
  parameter = std::fma(T(-rule.lr), gradient, parameter);
}

template <typename T>
void step_naively(const OptimizerRule& rule, Model& model) {
  for (std::size_t i = 1; i <= model.count; ++i) {
    std::array<T, kRows> element;
    for (std::size_t r = 0; r < kRows; ++r) element[r] = load<T>(model.rows[r], i);
    auto& [parameter, gradient, average, square, largest] = element;
    const auto* const as_adam = std::get_if<AdamRule>(&rule);
    if (as_adam != nullptr) {
      const T before = largest;
      naive_adam(*as_adam, parameter, gradient, average, square, largest);
      if (!as_adam->amsgrad) largest = before;
    } else {
      naive_sgd(std::get<SgdRule>(rule), parameter, gradient, average);
    }
    for (std::size_t r = 0; r < kRows; ++r) store(model.rows[r], i, quiet(element[r]));
  }
}

}  // namespace

TEST_CASE("optimizer: each operation is rounded as in torch's vectorised kernels") {
  for_each_rule([](DType type, const OptimizerRule& rule) {
    Model model(type, 1023);
    Model expected = model;
    model.step(rule, 0, model.count);
    type == DType::kFloat32 ? step_naively<float>(rule, expected)
                            : step_naively<double>(rule, expected);
    CHECK(model.rows == expected.rows);
  });
}

TEST_CASE("optimizer: the bits do not depend on the instruction set") {
  for_each_rule([](DType type, const OptimizerRule& rule) {
    const Model fresh(type, 4200);
    Model expected = fresh;
    expected.step(rule, 0, expected.count);
    for (const kernels::Vectors level : kernels::fused_levels()) {
      CAPTURE(static_cast<int>(level));
      Model model = fresh;
      model.step_at(level, rule);
      CHECK(model.rows == expected.rows);
    }
  });
}

TEST_CASE("optimizer: the bits do not depend on how a row is cut") {
  for_each_rule([](DType type, const OptimizerRule& rule) {
    const std::size_t count = 33000;  // more than two tiles
    const Model fresh(type, count);
    Model expected = fresh;
    expected.step(rule, 0, count);
    for (const std::size_t length : {15U, 17U, 1000U, 16385U}) {
      CAPTURE(length);
      Model model = fresh;
      for (std::size_t begin = 0; begin < count; begin += length) {
        model.step(rule, begin, std::min(begin + length, count));
      }
      CHECK(model.rows == expected.rows);
    }
  });
}

TEST_CASE("optimizer: a NaN is always the same quiet one, and stays where it is") {
  for_each_rule([](DType type, const OptimizerRule& rule) {
    Model model(type, 40, true);
    const bool single = type == DType::kFloat32;
    for (std::size_t i = 0; i < 40; i += 3) {  // negative, with a payload
      single ? store(model.rows[1], i + 1, std::bit_cast<float>(0xffc01234U))
             : store(model.rows[1], i + 1, std::bit_cast<double>(0xfff8000000001234U));
    }
    model.step(rule, 0, 40);
    for (std::size_t i = 0; i < 40; ++i) {
      CHECK(std::isnan(read(type, model.rows[0], i + 1)) == (i % 3 == 0));
      if (i % 3 != 0) continue;
      if (single) CHECK(load<std::uint32_t>(model.rows[0], i + 1) == 0x7fc00000U);
      if (!single) CHECK(load<std::uint64_t>(model.rows[0], i + 1) == 0x7ff8000000000000U);
    }
  });
}

TEST_CASE("optimizer: types and states that it lacks are errors") {
  Model model(DType::kFloat32, 4);
  OptimizerMemory memory = model.memory(0);
  CHECK_THROWS_WITH_AS(optimizer_step(SgdRule{}, DType::kBFloat16, memory, model.at(1, 0), 4),
                       "expected an optimizer's parameters in float32 or float64, got bfloat16",
                       Error);
  memory.state[1] = nullptr;
  CHECK_THROWS_AS(optimizer_step(adam(0.9), DType::kFloat32, memory, model.at(1, 0), 4), Error);
  CHECK_NOTHROW(optimizer_step(adam(0.9), DType::kFloat32, memory, model.at(1, 0), 0));
  CHECK_NOTHROW(optimizer_step(SgdRule{}, DType::kFloat32, memory, model.at(1, 0), 4));
}

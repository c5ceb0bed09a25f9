// Steps of rows without a collective: the bits are those of an OptimizerPass.
#include "c10d/buckets/moves/step_rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <doctest.h>

#include <cmath>
#include <memory>
#include <string>

#include "c10d/buckets/moves/optimizer_pass.h"
#include "cpp/c10d/support/group_ranks.h"
#include "cpp/support/ranks.h"

namespace dreamcomm {
namespace {

const OptimizerRule kAdam = AdamRule{.decay = 0.99,
                                     .lerp_weight = 0.1,
                                     .beta2 = 0.999,
                                     .square_weight = 0.001,
                                     .bias_correction2_sqrt = std::sqrt(0.001),
                                     .eps = 1e-8,
                                     .step_size = 0.01};
const OptimizerRule kSgd = SgdRule{.lr = 0.1, .momentum = 0.9, .nesterov = true};

at::Tensor numbers(at::IntArrayRef shape, double scale) {
  return (at::arange(c10::multiply_integers(shape), at::kFloat) * scale).sin().view(shape);
}

/// Of one rank, which then has all rows.
struct Rows {
  explicit Rows(const std::function<at::Tensor(const at::Tensor&)>& place) {
    for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{5, 9000}, {7}}) {
      const double scale = 0.1 * static_cast<double>(rows.size() + 1);
      rows.push_back(place(numbers(shape, scale)));
      gradients.push_back(place(numbers(shape, 3 * scale)));
      states.push_back({at::zeros({rows.back().numel()}), at::zeros({rows.back().numel()})});
    }
  }
  std::vector<at::Tensor> rows;
  std::vector<std::optional<at::Tensor>> gradients;
  std::vector<std::vector<at::Tensor>> states;
};

TEST_CASE("rows are stepped as by an optimizer's pass") {
  const auto options = [](DreamOptions& given) { given.heap_bytes = std::size_t{8} << 20; };
  testing::run_group({.size = 1, .options = options}, [](testing::GroupRank& rank) {
    Rows alone([](const at::Tensor& from) { return from; });
    Rows passed([&](const at::Tensor& from) {
      return rank.backend->allocateTensor(from.numel(), from.options())
          .view(from.sizes())
          .copy_(from);
    });
    Parameters parameters(2);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].name = std::to_string(i);
      parameters[i].tensor = passed.rows[i];
      parameters[i].tensor.mutable_grad() = *passed.gradients[i];
    }
    Rule rule;
    rule.group = rank.group;
    rule.row = kZero1;
    rule.heaps = rank.backend;
    const auto set = std::make_shared<BucketSet>(std::move(parameters), std::move(rule));
    set->set_buckets({{0, 1}});
    OptimizerPass pass(set, std::vector<std::optional<at::Tensor>>(2), passed.states);
    for (int step = 0; step < 3; ++step) {
      pass.step({kAdam, kSgd}, {0, 1}, Move::kSumRows);
      step_rows({kAdam, kSgd}, {0, 1}, alone.rows, alone.gradients, alone.states);
    }
    for (std::size_t i = 0; i < 2; ++i) {
      testing::require(alone.rows[i].equal(passed.rows[i]), "rows differ");
      testing::require(alone.states[i][0].equal(passed.states[i][0]), "states differ");
      testing::require(alone.rows[i]._version() == 3, "versions differ");
    }
  });
}

TEST_CASE("a row without a gradient stays, and a gradient in another order is refused") {
  Rows given([](const at::Tensor& from) { return from; });
  const at::Tensor before = given.rows[0].clone();
  given.gradients[0] = std::nullopt;
  given.gradients[1] = given.gradients[1]->view({7});
  step_rows({kSgd}, {-1, 0}, given.rows, given.gradients, given.states);
  CHECK(given.rows[0].equal(before));
  CHECK(given.rows[0]._version() == 0);
  CHECK(given.rows[1]._version() == 1);
  const auto step = [&](const at::Tensor& gradient, int rule) {
    step_rows({kSgd}, {rule, 0}, given.rows, {gradient, std::nullopt}, given.states);
  };
  CHECK_NOTHROW(step(at::ones({45000}), 0));
  CHECK_THROWS_AS(step(at::ones({9000, 5}).t(), 0), c10::ValueError);
  CHECK_THROWS_AS(step(at::ones({5, 9000}, at::kDouble), 0), c10::ValueError);
  CHECK_THROWS_AS(step(at::ones({5}), 0), c10::ValueError);
  CHECK_THROWS_AS(step(at::ones({5, 9000}), 1), c10::ValueError);
}

}  // namespace
}  // namespace dreamcomm

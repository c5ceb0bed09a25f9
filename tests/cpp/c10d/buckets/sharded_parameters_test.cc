// Gradients of sharded parameters, which the script has on other tensors than the parameters: what
// accumulates, what is replaced, and factors of one parameter. Numbers are small multiples of a
// half: all sums are exact, in any order.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <doctest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "c10d/backward/hooks.h"
#include "c10d/buckets/sharded_gradients.h"
#include "cpp/c10d/support/group_ranks.h"
#include "cpp/support/ranks.h"

namespace dreamcomm {
namespace {

using Flags = std::vector<bool>;
const Flags kAll{true, true, true};
const Flags kNone{false, false, false};

/// One rank's passes over three parameters, the last of which is a scalar. A pass of weight w makes
/// gradients of world * w * (rank + 1), whose average is w * (1 + ... + world).
class ShardedPasses {
 public:
  ShardedPasses(const testing::GroupRank& rank, const StageRow& row, bool in_heaps)
      : rank_(rank), weights_{at::zeros({5, 3}), at::zeros({7}), at::zeros({})} {
    Parameters parameters(weights_.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].tensor = weights_[i].requires_grad_(true);
      parameters[i].name = std::to_string(i);
    }
    Rule rule;
    rule.group = rank.group;
    rule.averages = true;
    set = std::make_shared<BucketSet>(std::move(parameters), std::move(rule));
    set->set_buckets({{2, 1}, {0}});
    const auto replan = [](const auto&) {
      return std::vector<std::vector<std::size_t>>{{1, 2}, {0}};
    };
    const auto finished = [this](bool reduced) { (reduced ? reducing : local) += 1; };
    pass = std::make_shared<BackwardPass>(set, BackwardPass::Callbacks{replan, {}, {}, finished});
    hooks_ = std::make_unique<PassHooks>(pass);
    if (!row.is_sharded()) return;
    shards = std::make_unique<ShardedGradients>(
        set, row, std::vector<at::ScalarType>(3, at::kFloat),
        std::vector<std::optional<at::Tensor>>(3), in_heaps ? rank.backend : nullptr);
  }

  void backward(double weight, const Flags& uses = kAll) {
    at::Tensor loss = at::zeros({});
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      if (uses[i]) loss = loss + weights_[i].sum() * (rank_.size * weight * (rank_.rank + 1));
    }
    if (!loss.requires_grad()) return;
    hooks_->await_backward({loss});
    loss.backward();
  }

  /// Requires that the shard of each parameter has this multiple of the average, and that nothing
  /// else has.
  void require_shards(const std::vector<double>& multiples) const {
    const std::vector<at::Tensor> reduced = shards->reduced();
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      testing::require(!weights_[i].grad().defined(), "a parameter has a gradient");
      const double average = multiples[i] * rank_.size * (rank_.size + 1) / 2;
      const at::Tensor shard = reduced[i];
      testing::require(shard.defined() == (multiples[i] != 0), "a shard is missing, or held");
      if (!shard.defined()) continue;
      const auto elements = elements_of_rank(weights_[i].sizes(), rank_.size, rank_.rank);
      testing::require(shard.equal(at::full({elements.count}, average, at::kFloat)),
                       "shard " + std::to_string(i) + " differs");
    }
  }
  const at::Tensor& weight(std::size_t i) const { return weights_[i]; }

  std::shared_ptr<BucketSet> set;
  std::shared_ptr<BackwardPass> pass;
  std::unique_ptr<ShardedGradients> shards;
  int reducing = 0;
  int local = 0;

 private:
  const testing::GroupRank& rank_;
  std::vector<at::Tensor> weights_;
  std::unique_ptr<PassHooks> hooks_;
};

/// Runs `body` at stage 3, on each number of ranks and by each way to reduce rows.
void on_each(const std::function<void(ShardedPasses&, int rank)>& body) {
  for (const int world : {1, 2, 3}) {
    for (const bool in_heaps : {false, true}) {
      CAPTURE(world);
      CAPTURE(in_heaps);
      CHECK_NOTHROW(testing::run_group({.size = world}, [&](testing::GroupRank& rank) {
        ShardedPasses passes(rank, kZero3, in_heaps);
        body(passes, rank.rank);
      }));
    }
  }
}

TEST_CASE("averages add up in the shards until the script lets them go") {
  on_each([](ShardedPasses& passes, int) {
    passes.backward(1);
    passes.require_shards({1, 1, 1});
    passes.backward(2);
    passes.backward(3, {true, false, true});
    passes.require_shards({6, 3, 6});
    testing::require(passes.shards->hold_gradients(), "nothing is held");
    passes.shards->hold({true, false, true});
    passes.require_shards({6, 0, 6});
    passes.backward(1, {true, false, true});
    passes.require_shards({7, 0, 7});
    passes.shards->hold(kNone);
    testing::require(!passes.shards->hold_gradients(), "something is held");
    passes.backward(5);
    passes.require_shards({5, 5, 5});
    testing::require(passes.reducing == 5 && passes.local == 0, "passes were not reported");
  });
}

TEST_CASE("what a rank has accumulated alone joins the shards with the next reduction") {
  on_each([](ShardedPasses& passes, int rank) {
    for (const bool in_pass : {true, false, true}) {
      passes.backward(1);
      passes.pass->set_sync(false);
      passes.backward(2, {true, true, rank == 0});
      passes.backward(0.5, {true, false, false});
      testing::require(passes.weight(0).grad().defined(), "nothing has accumulated");
      testing::require(!passes.shards->reduced()[0].defined(), "it counts as reduced");
      passes.pass->set_sync(true);
      if (in_pass) passes.backward(1, {false, true, false});
      if (!in_pass) passes.pass->reduce_now();
      const int world = passes.set->rule.group->getSize();
      const double of_one_rank = 4.0 / (world * (world + 1));  // the scalar's average is 2
      passes.require_shards({3.5, in_pass ? 4.0 : 3.0, 1 + of_one_rank});
      passes.shards->hold(kNone);
    }
  });
}

TEST_CASE("an average that a script has kept stays as it is, unless the next one is added") {
  on_each([](ShardedPasses& passes, int) {
    passes.backward(1);
    const at::Tensor kept = passes.shards->memory(0).detach();
    const void* const other = passes.shards->memory(1).const_data_ptr();
    passes.backward(1);
    passes.require_shards({2, 2, 2});
    const at::Tensor before = kept.clone();
    testing::require(kept.equal(passes.shards->memory(0)), "added elsewhere");
    passes.shards->hold(kNone);
    passes.backward(3);
    passes.require_shards({3, 3, 3});
    testing::require(kept.equal(before), "a kept average has changed");
    testing::require(passes.shards->memory(1).const_data_ptr() == other, "memory was not reused");
  });
}

TEST_CASE("parameters have factors of their own") {
  for (const StageRow& row : {kDataParallel, kZero2, kZero3}) {
    for (const bool in_heaps : {false, true}) {
      testing::run_group({.size = 2}, [&](testing::GroupRank& rank) {
        ShardedPasses passes(rank, row, in_heaps);
        CHECK_THROWS_AS(passes.set->set_factors({1, 0, 1}), c10::ValueError);
        passes.set->set_factors({0, 2, 2});
        passes.backward(1);
        const double sum = 2 * 3;  // its average is 3
        const std::vector<double> expected{sum / 2, sum * 2, sum * 2};
        for (std::size_t i = 0; i < expected.size(); ++i) {
          const at::Tensor found =
              row.is_sharded() ? passes.shards->memory(i) : passes.weight(i).grad();
          testing::require(found.eq(expected[i]).all().item<bool>(), "another factor");
        }
        CHECK_THROWS_AS(passes.set->set_buckets({{0, 1, 2}}), c10::ValueError);
      });
    }
  }
}

}  // namespace
}  // namespace dreamcomm

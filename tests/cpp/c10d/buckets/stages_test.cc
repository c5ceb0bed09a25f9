// Each stage trains a few parameters in backward passes of autograd, with ranks as threads: the
// weights are those of one process, bit for bit. Numbers are small multiples of a half: all sums
// are exact, in any order.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <doctest.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "c10d/backward/hooks.h"
#include "c10d/buckets/moves/gather.h"
#include "c10d/buckets/moves/optimizer_pass.h"
#include "c10d/buckets/sharded_gradients.h"
#include "cpp/c10d/support/group_ranks.h"
#include "cpp/support/ranks.h"

namespace dreamcomm {
namespace {

constexpr double kRate = 0.5;
constexpr int kSteps = 3;

TensorList initial() {
  return {at::arange(15, at::kFloat).view({5, 3}), at::ones({2, 4, 2}), at::full({}, 3.0F),
          at::zeros({0, 2}), at::arange(7, at::kFloat)};
}

/// What a rank's pass adds to the gradient of a parameter: a multiple of the number of ranks.
double slope(int rank, int world, std::size_t parameter, int step) {
  return world * (rank + static_cast<double>(parameter) * step - 1);
}

/// The weights after all steps on one process, with the ranks' average.
TensorList trained_alone(int world) {
  TensorList weights = initial();
  for (int step = 0; step < kSteps; ++step) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      double sum = 0;
      for (int rank = 0; rank < world; ++rank) sum += slope(rank, world, i, step);
      weights[i].sub_(kRate * sum / world);
    }
  }
  return weights;
}

/// One rank's training, as its row of the table says.
class Training {
 public:
  Training(const testing::GroupRank& rank, const StageRow& row, bool in_heaps)
      : rank_(rank), row_(row), whole_(initial()) {
    for (at::Tensor& one : whole_) {
      if (in_heaps && one.numel() > 0) one = in_heap(one);
      one.requires_grad_(true);
    }
    if (row.after_use() == Move::kKeepRows) rows_ = keep_rows(rank_.group, whole_);
    set_ = std::make_shared<BucketSet>(parameters(), rule());
    set_->set_buckets({{4, 3, 2}, {1, 0}});
    pass_ = std::make_shared<BackwardPass>(set_, BackwardPass::Callbacks{reversed, {}, {}, {}});
    hooks_ = std::make_unique<PassHooks>(pass_);
    if (!row.is_sharded()) return;
    const std::vector<at::ScalarType> types(whole_.size(), at::kFloat);
    gradients_ = std::make_unique<ShardedGradients>(set_, row, types, stand_ins(),
                                                    in_heaps ? rank_.backend : nullptr);
    const std::vector<std::optional<at::Tensor>> no_masters(whole_.size());
    if (in_heaps) steps_ = std::make_unique<OptimizerPass>(set_, no_masters, no_states());
  }

  void step(int number) {
    if (row_.before_use() == Move::kGatherRows) {
      put_rows(rank_.group, rows_, whole_);
      gather_rows(rank_.group, whole_);
    }
    backward(number);
    if (row_.after_use() == Move::kKeepRows) drop_others();
    if (steps_ && row_.after_step() == Move::kGatherRows) return step_in_heaps();
    if (row_.before_step() == Move::kSumRows) pass_->reduce_now();
    step_here();
    if (row_.after_step() == Move::kGatherRows) gather_rows(rank_.group, whole_);
    for (at::Tensor& one : whole_) one.mutable_grad() = at::Tensor();
    if (gradients_ && row_.before_use() == Move::kGatherRows)
      gradients_->hold(std::vector<bool>(whole_.size()));
  }

  /// The whole weights. Collective.
  TensorList weights() {
    if (row_.before_use() == Move::kGatherRows) {
      put_rows(rank_.group, rows_, whole_);
      gather_rows(rank_.group, whole_);
    }
    return whole_;
  }

 private:
  static std::vector<std::vector<std::size_t>> reversed(
      const std::vector<std::vector<std::int64_t>>&) {
    return {{3}, {2, 4}, {0, 1}};
  }

  at::Tensor in_heap(const at::Tensor& from) const {
    const at::Tensor flat = rank_.backend->allocateTensor(from.numel(), from.options());
    return flat.view(from.sizes()).copy_(from);
  }

  Parameters parameters() const {
    Parameters all(whole_.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].tensor = whole_[i];
      all[i].name = std::to_string(i);
    }
    return all;
  }

  Rule rule() const {
    Rule rule;
    rule.group = rank_.group;
    rule.averages = true;
    return rule;
  }

  /// An optimizer's pass leaves out parameters without a gradient, or what stands for it.
  std::vector<std::optional<at::Tensor>> stand_ins() const {
    std::vector<std::optional<at::Tensor>> all(whole_.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (row_.after_step() == Move::kGatherRows && !row_.is_deferred())
        all[i] = at::zeros_like(whole_[i].detach());
    }
    return all;
  }

  std::vector<std::vector<at::Tensor>> no_states() const {
    return std::vector<std::vector<at::Tensor>>(whole_.size());
  }

  void backward(int number) {
    at::Tensor loss = at::zeros({});
    for (std::size_t i = 0; i < whole_.size(); ++i)
      loss = loss + whole_[i].sum() * slope(rank_.rank, rank_.size, i, number);
    hooks_->await_backward({loss});
    loss.backward();
  }

  /// Nothing may read the others' rows until they are gathered again.
  void drop_others() {
    const at::NoGradGuard no_grad;
    for (at::Tensor& one : whole_) one.fill_(std::numeric_limits<float>::quiet_NaN());
  }

  void step_in_heaps() {
    SgdRule sgd;
    sgd.lr = kRate;
    steps_->step({sgd}, std::vector<int>(whole_.size()), row_.before_step());
    for (at::Tensor& one : whole_) one.mutable_grad() = at::Tensor();
  }

  void step_here() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < whole_.size(); ++i) {
      if (whole_[i].numel() == 0) continue;
      if (!row_.is_sharded()) {
        whole_[i].sub_(whole_[i].grad() * kRate);
        continue;
      }
      const at::Tensor change = gradients_->memory(i) * kRate;
      if (rows_.empty()) {
        const TensorList rows = keep_rows(rank_.group, {whole_[i]});
        put_rows(rank_.group, {rows[0] - change}, {whole_[i]});
      } else {
        rows_[i].sub_(change);
      }
    }
  }

  const testing::GroupRank& rank_;
  const StageRow row_;
  TensorList whole_;
  TensorList rows_;  // where parameters are sharded between uses
  std::shared_ptr<BucketSet> set_;
  std::shared_ptr<BackwardPass> pass_;
  std::unique_ptr<PassHooks> hooks_;
  std::unique_ptr<ShardedGradients> gradients_;
  std::unique_ptr<OptimizerPass> steps_;
};

void train(const StageRow& row, int world, bool in_heaps) {
  const TensorList expected = trained_alone(world);
  testing::run_group({.size = world}, [&](testing::GroupRank& rank) {
    Training training(rank, row, in_heaps);
    for (int step = 0; step < kSteps; ++step) training.step(step);
    const TensorList found = training.weights();
    for (std::size_t i = 0; i < found.size(); ++i) {
      testing::require(found[i].detach().equal(expected[i]), "weights differ");
    }
  });
}

TEST_CASE("every stage trains as one process") {
  for (const std::size_t stage : {0, 1, 2, 3}) {
    for (const int world : {1, 2, 3, 4}) {
      CAPTURE(stage);
      CAPTURE(world);
      CHECK_NOTHROW(train(kStages.at(stage), world, /*in_heaps=*/false));
      CHECK_NOTHROW(train(kStages.at(stage), world, /*in_heaps=*/true));
    }
  }
}

}  // namespace
}  // namespace dreamcomm

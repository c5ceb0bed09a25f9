#include "c10d/buckets/shard_sums.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <c10/util/Exception.h>

#include <utility>

#include "c10d/buckets/ownership.h"

namespace dreamcomm {
namespace {

/// +0 in place of -0, as a sum with +0 has it.
at::Tensor with_zero(at::Tensor one, bool in_place) {
  return in_place ? one.add_(0.0) : at::add(one, 0.0);
}

/// The sum of two gradients, in the memory of one of them if nothing else has it.
at::Tensor added(at::Tensor left, at::Tensor right) {
  if (!left.defined() && !right.defined()) return {};
  if (!left.defined() || !right.defined()) {
    at::Tensor one = left.defined() ? std::move(left) : std::move(right);
    const bool is_own = is_alone(one);
    return with_zero(std::move(one), is_own);
  }
  if (is_alone(left)) return left.add_(right);
  if (is_alone(right)) return right.add_(left);
  return at::add(left, right);
}

/// The same where the right one is a gradient of this pass, which stays where it is.
at::Tensor added_to(const at::Tensor& left, at::Tensor gradient) {
  if (!gradient.defined()) return added(left, {});
  const bool is_own = owns_memory(gradient);
  if (!left.defined()) return with_zero(std::move(gradient), is_own);
  return is_own ? gradient.add_(left) : at::add(gradient, left);
}

/// As it is summed.
at::Tensor summand(const Parameter& parameter, at::Tensor gradient) {
  return gradient.defined() ? gradient.to(parameter.gradient_type()) : gradient;
}

}  // namespace

void ShardSums::begin_step(Parameters& parameters, const std::string& who, bool keeps) {
  for (const Parameter& one : parameters) {
    const bool is_shard = one.is_stand_in();
    const at::Tensor& now = is_shard ? one.shard.gradient : one.tensor.grad();
    TORCH_CHECK(!now.defined() || is_zero(now), who, ": parameter '", one.name,
                "' has a gradient when a step of shards begins: call zero_grad() before");
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Parameter& one = parameters[i];
    sums_[i].clear();
    given_[i] = keeps ? one.tensor.grad() : at::Tensor();
    if (one.is_stand_in()) one.shard.content = GradientShard::Content::kNothing;
    one.grad() = at::Tensor();
    one.touched = false;
    one.seen.forget();
  }
  folded_.assign(parameters.size(), false);
  state_ = State::kClosed;
  began_ = true;
  done_ = 0;
}

void ShardSums::begin_pass(const std::string& who) {
  TORCH_CHECK(state_ != State::kClosed, who,
              ": a backward pass with invariant_shards runs in a loop over the module's shards(): "
              "for shard in model.shards(): ...");
  TORCH_CHECK(state_ == State::kOpen, who,
              ": a shard has one backward pass, and this is its second: add its losses before");
  state_ = State::kRan;
}

void ShardSums::end_shard(Parameters& parameters, const std::string& who) {
  TORCH_CHECK(state_ == State::kRan, who, ": shard ", done_ + 1, " of this rank's ", per_rank_,
              " ran no backward pass; give one with a loss of zero if it has no data");
  state_ = State::kClosed;
  if (!is_last()) {
    for (const Parameter& one : parameters) {
      TORCH_CHECK(!one.seen.is_set() || one.seen.is_unchanged(one.tensor.grad()), who,
                  ": the gradient of '", one.name,
                  "' was changed, or cleared, between a shard's "
                  "backward pass and the next shard: change gradients after the loop, when they "
                  "are those of all shards");
    }
    put_aside(parameters);
  }
  ++done_;
}

void ShardSums::put_aside(Parameters& parameters) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Parameter& one = parameters[i];
    std::vector<at::Tensor>& sums = sums_[i];
    at::Tensor sum = summand(one, std::exchange(one.grad(), at::Tensor()));
    // A script that has kept it may write to it.
    if (sum.defined() && !is_alone(sum)) sum = sum.clone();
    for (std::size_t rest = done_; (rest & 1U) != 0; rest >>= 1U) {
      at::Tensor left = std::move(sums.back());
      sums.pop_back();
      sum = added(std::move(left), std::move(sum));
    }
    sums.push_back(std::move(sum));
    one.touched = false;
  }
}

void ShardSums::fold(Parameters& parameters, std::size_t index) {
  if (folded_[index]) return;
  folded_[index] = true;
  const at::NoGradGuard no_grad;
  Parameter& one = parameters[index];
  at::Tensor& now = one.grad();
  now = summand(one, now);
  for (std::vector<at::Tensor>& sums = sums_[index]; !sums.empty(); sums.pop_back())
    now = added_to(std::exchange(sums.back(), at::Tensor()), now);
  one.touched = now.defined();
  one.seen.set(now);
}

void ShardSums::give_back(Parameters& parameters) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor given = std::exchange(given_[i], at::Tensor());
    at::Tensor& now = parameters[i].grad();
    if (!given.defined() || !now.defined()) continue;
    given.copy_(now);
    now = given;
    parameters[i].mark_reduced();
  }
}

void ShardSums::leave(Parameters& parameters) {
  state_ = State::kClosed;
  if (missing() == 0) return;
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    sums_[i].clear();
    at::Tensor given = std::exchange(given_[i], at::Tensor());
    if (given.defined()) parameters[i].grad() = given.zero_();
  }
}

}  // namespace dreamcomm

// A bucket whose gradients are sharded: by one pass over the ranks' heaps, or by a reduce_scatter
// of rows that are put in the order of ranks first.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "c10d/gradients/gradient_bucket.h"

namespace dreamcomm {
namespace {

/// A later reduction is added where the last one is still the gradient.
void prepare(Gradient& gradient) {
  gradient.notice_cleared();
  if (!gradient.touched) gradient.shard.adds = gradient.is_stand_in();
}

/// The gradient's elements one after the other, as the parameter's lie in memory.
at::Tensor in_memory_order(const Gradient& gradient) {
  at::Tensor now = gradient.tensor();
  if (!gradient.lies_as_parameter()) now = at::empty_like(gradient.parameter).copy_(now);
  return now.as_strided({now.numel()}, {1});
}

/// Elements of the members' shards of the rank that has most: rank 0, by torch.chunk's rule.
std::int64_t width_of(const Gradients& gradients, const std::vector<std::size_t>& members,
                      int world) {
  std::int64_t width = 0;
  for (const std::size_t member : members) width += gradients[member].elements(world, 0).count;
  return width;
}

}  // namespace

std::vector<at::Tensor> GradientBucket::place(Gradients& gradients, const BucketRule& rule) {
  const at::NoGradGuard no_grad;
  copied_ = 0;
  lay_out(gradients, rule);
  renew_if_kept(gradients, rule);
  std::vector<at::Tensor> placed(members_.size());
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Gradient& gradient = gradients[members_[i]];
    if (!gradient.touched || !gradient.is_local() || gradient.parameter.numel() == 0) continue;
    placed[i] = local_in_heap(gradient, slots_[i], rule);
  }
  return placed;
}

void GradientBucket::launch_sharded(Gradients& gradients, const BucketRule& rule) {
  for (const std::size_t member : members_) prepare(gradients[member]);
  if (!rule.heaps) return send_shards(gradients, rule);
  const std::vector<at::Tensor> placed = place(gradients, rule);
  pass_ =
      std::make_shared<ReduceToShards>(rule.group->getSize(), rule.group->getRank(), rule.factor);
  for (std::size_t i = 0; i < members_.size(); ++i) {
    pass_->add(gradients[members_[i]], placed[i]);
    if (placed[i].defined()) parts_.push_back(placed[i]);
  }
  work_ = rule.heaps->sharded_pass(pass_, parts_, /*async=*/true);
}

/// The members' rows of each rank, in the order of ranks, each rank's as many as rank 0's.
void GradientBucket::send_shards(Gradients& gradients, const BucketRule& rule) {
  const int world = rule.group->getSize();
  const Gradient& first = gradients[members_.front()];
  const auto options = first.parameter.options().dtype(first.shard.sum_type).requires_grad(false);
  const std::int64_t width = width_of(gradients, members_, world);
  at::Tensor all = at::zeros({world * width}, options);
  for (int rank = 0; rank < world; ++rank) {
    std::int64_t place = rank * width;
    for (const std::size_t member : members_) {
      const Gradient& gradient = gradients[member];
      const ShardRange rows = gradient.elements(world, rank);
      if (gradient.touched && gradient.is_local() && rows.count > 0) {
        const at::Tensor flat = in_memory_order(gradient);
        all.narrow(0, place, rows.count).copy_(flat.narrow(0, rows.begin, rows.count));
      }
      place += rows.count;
    }
  }
  // The rows are in the send buffer.
  if (!rule.deferred) {
    for (const std::size_t member : members_) {
      if (gradients[member].is_local()) gradients[member].tensor() = at::Tensor();
    }
  }
  copied_ = static_cast<std::uint64_t>(all.nbytes());
  at::Tensor mine = at::empty({width}, options);
  parts_ = {mine, all};
  c10d::ReduceScatterOptions opts;
  opts.reduceOp = rule.averages && rule.factor == 0 ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
  opts.asyncOp = true;
  // As a list: torch 2.13 and those before have no other call in common.
  std::vector<at::Tensor> outputs{mine};
  std::vector<std::vector<at::Tensor>> inputs{all.split(std::max<std::int64_t>(width, 1))};
  if (width == 0) inputs[0].assign(static_cast<std::size_t>(world), mine);
  work_ = rule.group->reduce_scatter(outputs, inputs, opts);
}

void GradientBucket::receive_shards(Gradients& gradients, const BucketRule& rule,
                                    const std::vector<bool>& touched) {
  scale(rule);
  const int world = rule.group->getSize();
  std::int64_t place = 0;
  for (const std::size_t member : members_) {
    Gradient& gradient = gradients[member];
    Shard& shard = gradient.shard;
    const std::int64_t count = gradient.elements(world, rule.group->getRank()).count;
    const at::Tensor received = parts_[0].narrow(0, place, count);
    place += count;
    if (!touched[member]) continue;
    if (!shard.gradient.defined()) shard.gradient = at::empty({count}, parts_[0].options());
    if (shard.adds) {
      shard.gradient.add_(received);
    } else {
      shard.gradient.copy_(received);
    }
  }
}

void GradientBucket::settle_sharded(Gradients& gradients, const BucketRule& rule,
                                    const std::vector<bool>& touched) {
  complete_sharded(gradients, rule);
  if (rule.heaps) return;
  receive_shards(gradients, rule, touched);
  touched_.clear();
  for (const std::size_t member : members_) touched_.push_back(touched[member]);
  note_reduced(gradients, rule);
}

void GradientBucket::complete_sharded(Gradients& gradients, const BucketRule& rule) {
  if (!work_) return;
  const at::NoGradGuard no_grad;
  std::exchange(work_, nullptr)->wait();
  if (!rule.heaps) {
    parts_.resize(1);
    return;
  }
  touched_ = std::exchange(pass_, nullptr)->touched();
  note_reduced(gradients, rule);
}

void GradientBucket::note_reduced(Gradients& gradients, const BucketRule& rule) {
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Gradient& gradient = gradients[members_[i]];
    if (rule.deferred) {
      gradient.shard.valid = touched_[i];
      gradient.mark_reduced();
    }
    if (!touched_[i]) continue;
    gradient.shard.adds = false;
    gradient.shard.valid = true;
    if (!rule.deferred) gradient.tensor() = gradient.shard.stand_in;
    gradient.mark_reduced();
  }
  parts_.clear();
}

}  // namespace dreamcomm

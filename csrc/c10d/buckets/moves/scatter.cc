// Reduce-scatters of a bucket: by one pass over the ranks' heaps, or by a collective of rows that
// are put in the order of ranks first.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zero.h>

#include <algorithm>
#include <utility>

#include "c10d/buckets/bucket.h"
#include "c10d/buckets/memory.h"

namespace dreamcomm {
namespace {

/// A later reduction is added where the last one is still the gradient.
void prepare(Parameter& parameter) {
  parameter.notice_cleared();
  GradientShard& shard = parameter.shard;
  if (shard.apart) {
    shard.set_adds(shard.is_held());
  } else if (!parameter.touched) {
    shard.set_adds(parameter.is_stand_in());
  }
}

/// The gradient's elements one after the other, as the parameter's lie in memory.
at::Tensor elements_of(const Parameter& parameter) {
  const at::Tensor& now = parameter.tensor.grad();
  if (parameter.lies_as_parameter()) return in_memory_order(now);
  const auto options = parameter.tensor.options().dtype(now.scalar_type());
  return in_memory_order(at::empty_like(parameter.tensor, options).copy_(now));
}

Sections sections_of(const Parameters& parameters, const std::vector<std::size_t>& members,
                     int world) {
  std::vector<c10::IntArrayRef> shapes;
  for (const std::size_t member : members) shapes.push_back(parameters[member].tensor.sizes());
  return {std::move(shapes), world};
}

}  // namespace

void Bucket::launch_scatter(Parameters& parameters, const Rule& rule) {
  bytes_ = 0;
  for (const std::size_t member : members_) {
    prepare(parameters[member]);
    bytes_ += parameters[member].gradient_bytes();
  }
  if (rule.heaps) {
    launch_in_heaps(parameters, rule);
  } else {
    launch_rows(parameters, rule);
  }
}

void Bucket::launch_in_heaps(Parameters& parameters, const Rule& rule) {
  const std::vector<at::Tensor> placed = place(parameters, rule);
  pass_ = std::make_shared<ReduceToShards>(rule.group->getSize(), rule.group->getRank(),
                                           rule.factor_or(factor_));
  for (std::size_t i = 0; i < members_.size(); ++i) {
    pass_->add(parameters[members_[i]], placed[i]);
    if (placed[i].defined()) parts_.push_back(placed[i]);
  }
  work_ = rule.heaps->sharded_pass(pass_, parts_, /*async=*/true);
}

/// The members' rows of each rank, in the order of ranks.
void Bucket::launch_rows(Parameters& parameters, const Rule& rule) {
  const int world = rule.group->getSize();
  const Parameter& first = parameters[members_.front()];
  const auto options = first.tensor.options().dtype(first.shard.sum_type).requires_grad(false);
  const Sections sections = sections_of(parameters, members_, world);
  const std::int64_t width = sections.width();
  at::Tensor all = allocate(rule, world * width, first.tensor, first.shard.sum_type).zero_();
  for (int rank = 0; rank < world; ++rank) {
    sections.of_rank(rank, [&](std::size_t i, std::int64_t place, const RankRange& elements) {
      const Parameter& parameter = parameters[members_[i]];
      if (!parameter.touched || !parameter.is_local() || elements.count == 0) return;
      all.narrow(0, rank * width + place, elements.count)
          .copy_(elements_of(parameter).narrow(0, elements.begin, elements.count));
    });
  }
  // The rows are in the send buffer.
  for (const std::size_t member : members_) {
    Parameter& parameter = parameters[member];
    if (!rule.row.is_deferred() && parameter.is_local()) parameter.grad() = at::Tensor();
  }
  copied_ = static_cast<std::uint64_t>(all.nbytes());
  parts_ = {at::empty({width}, options), all};
  std::vector<at::Tensor> inputs{all.split(std::max<std::int64_t>(width, 1))};
  if (width == 0) inputs.assign(static_cast<std::size_t>(world), parts_[0]);
  work_ = reduce_scatter(rule.group, parts_[0], std::move(inputs), rule.op(factor_));
}

void Bucket::settle_rows(Parameters& parameters, const Rule& rule,
                         const std::vector<bool>& touched) {
  scale(rule);
  const Sections sections = sections_of(parameters, members_, rule.group->getSize());
  std::vector<bool> mine;
  sections.of_rank(rule.group->getRank(),
                   [&](std::size_t i, std::int64_t place, const RankRange& elements) {
                     mine.push_back(touched[members_[i]]);
                     if (!mine.back()) return;
                     GradientShard& shard = parameters[members_[i]].shard;
                     const at::Tensor received = parts_[0].narrow(0, place, elements.count);
                     shard.gradient = shard.next_memory(elements.count, received.device());
                     if (shard.adds()) {
                       shard.gradient.add_(received);
                     } else {
                       shard.gradient.copy_(received);
                     }
                   });
  note_scattered(parameters, rule, mine);
}

void Bucket::complete_scatter(Parameters& parameters, const Rule& rule) {
  if (!work_) return;
  const at::NoGradGuard no_grad;
  std::exchange(work_, nullptr)->wait();
  if (rule.heaps) {
    const std::shared_ptr<ReduceToShards> pass = std::exchange(pass_, nullptr);
    for (std::size_t i = 0; i < members_.size(); ++i) pass->give(parameters[members_[i]], i);
    note_scattered(parameters, rule, pass->touched());
  } else {
    parts_.resize(1);
  }
}

/// `touched`: which members any rank has.
void Bucket::note_scattered(Parameters& parameters, const Rule& rule,
                            const std::vector<bool>& touched) {
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Parameter& parameter = parameters[members_[i]];
    if (touched[i]) {
      parameter.shard.content = GradientShard::Content::kAverage;
      if (!rule.row.is_deferred()) parameter.grad() = parameter.shard.stand_in;
      parameter.mark_reduced();
    } else if (rule.row.is_deferred()) {
      parameter.shard.content = GradientShard::Content::kNothing;
      parameter.mark_reduced();
    }
  }
  parts_.clear();
}

}  // namespace dreamcomm

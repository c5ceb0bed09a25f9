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

/// `numbers`: of `members` that the sections have.
Sections sections_of(const Parameters& parameters, const std::vector<std::size_t>& numbers,
                     const std::vector<std::size_t>& members, int world) {
  std::vector<c10::IntArrayRef> shapes;
  for (const std::size_t number : numbers)
    shapes.push_back(parameters[members[number]].tensor.sizes());
  return {std::move(shapes), world};
}

/// A rank's rows of so many bytes are summed where they lie, by a call of their own. Below, a copy
/// costs less than that.
constexpr std::int64_t kAloneBytes = 64 << 10;

/// The type in which rows are summed: gradients of more bits than their sum are rounded at the end.
at::ScalarType call_type(const Parameter& parameter) {
  return parameter.widens ? c10::promoteTypes(at::kFloat, parameter.shard.sum_type)
                          : parameter.shard.sum_type;
}

/// True if a gradient's rows are as many on all ranks, and enough for a call of their own.
bool is_alone_in_call(const Parameter& parameter, int world) {
  const at::Tensor& tensor = parameter.tensor;
  if (tensor.dim() == 0 || tensor.size(0) % world != 0) return false;
  const bool is_plain = tensor.is_non_overlapping_and_dense() &&
                        parameter.gradient_type() == parameter.shard.sum_type;
  const auto bytes = static_cast<std::int64_t>(parameter.gradient_bytes());
  return is_plain && bytes / world >= kAloneBytes;
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
  work_ = rule.heaps->sharded_pass(pass_, parts_, rule.op(factor_), /*async=*/true);
}

void Bucket::launch_rows(Parameters& parameters, const Rule& rule) {
  const int world = rule.group->getSize();
  copied_ = 0;
  RowsPart packed;
  std::vector<std::size_t> alone;
  for (std::size_t i = 0; i < members_.size(); ++i)
    (is_alone_in_call(parameters[members_[i]], world) ? alone : packed.numbers).push_back(i);
  if (!packed.numbers.empty()) launch_packed(parameters, rule, std::move(packed));
  for (const std::size_t number : alone) launch_alone(parameters, rule, number);
  // The rows are copied, or the sent tensor is the gradient.
  for (const std::size_t member : members_) {
    Parameter& parameter = parameters[member];
    if (!rule.row.is_deferred() && parameter.is_local()) parameter.grad() = at::Tensor();
  }
}

/// The members' rows of each rank, in the order of ranks.
void Bucket::launch_packed(const Parameters& parameters, const Rule& rule, RowsPart part) {
  const int world = rule.group->getSize();
  const Parameter& first = parameters[members_[part.numbers.front()]];
  const Sections sections = sections_of(parameters, part.numbers, members_, world);
  const std::int64_t width = sections.width();
  part.sent = allocate(rule, world * width, first.tensor, call_type(first)).zero_();
  for (int rank = 0; rank < world; ++rank) {
    sections.of_rank(rank, [&](std::size_t i, std::int64_t place, const RankRange& elements) {
      const Parameter& parameter = parameters[members_[part.numbers[i]]];
      if (!parameter.touched || !parameter.is_local() || elements.count == 0) return;
      part.sent.narrow(0, rank * width + place, elements.count)
          .copy_(elements_of(parameter).narrow(0, elements.begin, elements.count));
    });
  }
  copied_ += static_cast<std::uint64_t>(part.sent.nbytes());
  part.received = at::empty({width}, part.sent.options());
  TensorList inputs{part.sent.split(std::max<std::int64_t>(width, 1))};
  if (width == 0) inputs.assign(static_cast<std::size_t>(world), part.received);
  part.work = reduce_scatter(rule.group, part.received, std::move(inputs), rule.op(factor_));
  rows_.push_back(std::move(part));
}

/// A large gradient, whose rows of each rank lie one after the other. A rank that has none sends
/// zeros.
void Bucket::launch_alone(Parameters& parameters, const Rule& rule, std::size_t number) {
  Parameter& parameter = parameters[members_[number]];
  GradientShard& shard = parameter.shard;
  const int world = rule.group->getSize();
  RowsPart part;
  part.numbers = {number};
  if (parameter.touched && parameter.is_local()) {
    part.sent = elements_of(parameter);
  } else {
    part.sent = allocate(rule, parameter.tensor.numel(), parameter.tensor, shard.sum_type).zero_();
  }
  const std::int64_t count = parameter.tensor.numel() / world;
  // Rows that are added to what is there come elsewhere first.
  part.received = shard.adds() ? at::empty({count}, part.sent.options())
                               : shard.next_memory(count, part.sent.device());
  part.work = reduce_scatter(rule.group, part.received, part.sent.split(count), rule.op(factor_));
  rows_.push_back(std::move(part));
}

void Bucket::settle_rows(Parameters& parameters, const Rule& rule,
                         const std::vector<bool>& touched) {
  std::vector<bool> mine;
  for (const std::size_t member : members_) mine.push_back(touched[member]);
  for (RowsPart& part : rows_) {
    scale(rule, part.received);
    settle_part(parameters, rule, part, mine);
  }
  rows_.clear();
  note_scattered(parameters, rule, mine);
}

void Bucket::settle_part(Parameters& parameters, const Rule& rule, const RowsPart& part,
                         const std::vector<bool>& touched) {
  const Sections sections = sections_of(parameters, part.numbers, members_, rule.group->getSize());
  sections.of_rank(
      rule.group->getRank(), [&](std::size_t i, std::int64_t place, const RankRange& elements) {
        if (!touched[part.numbers[i]]) return;
        GradientShard& shard = parameters[members_[part.numbers[i]]].shard;
        const at::Tensor received = part.received.narrow(0, place, elements.count);
        if (shard.adds()) {
          shard.gradient.add_(received);
        } else if (part.received.numel() == elements.count && part.numbers.size() == 1 &&
                   part.received.scalar_type() == shard.sum_type) {
          shard.gradient = part.received;
        } else {
          shard.gradient = shard.next_memory(elements.count, received.device());
          shard.gradient.copy_(received);
        }
      });
}

bool Bucket::has_ended() const {
  const auto ended = [](const RowsPart& part) { return !part.work || part.work->isCompleted(); };
  return (work_ && work_->isCompleted()) ||
         (!rows_.empty() && std::all_of(rows_.begin(), rows_.end(), ended));
}

void Bucket::complete_scatter(Parameters& parameters, const Rule& rule) {
  const at::NoGradGuard no_grad;
  for (RowsPart& part : rows_) {
    if (const WorkPtr work = std::exchange(part.work, nullptr)) work->wait();
    part.sent = at::Tensor();
  }
  if (!work_) return;
  std::exchange(work_, nullptr)->wait();
  const std::shared_ptr<ReduceToShards> pass = std::exchange(pass_, nullptr);
  for (std::size_t i = 0; i < members_.size(); ++i) pass->give(parameters[members_[i]], i);
  note_scattered(parameters, rule, pass->touched());
}

/// `touched`: which members any rank has.
void Bucket::note_scattered(Parameters& parameters, const Rule& rule,
                            const std::vector<bool>& touched) {
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Parameter& parameter = parameters[members_[i]];
    // A copy was sent, so that this one was made since: it waits for another reduction.
    const bool is_newer = rule.gathers() && parameter.is_local();
    if (touched[i] && is_newer) {
      parameter.shard.content = GradientShard::Content::kAverage;
    } else if (touched[i]) {
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

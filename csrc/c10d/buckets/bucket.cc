#include "c10d/buckets/bucket.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "c10d/buckets/memory.h"
#include "c10d/buckets/ownership.h"
#include "c10d/process/process_heap.h"

namespace dreamcomm {
namespace {

bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.strides() == b.strides();
}

}  // namespace

Bucket::Bucket(std::vector<std::size_t> members, const Parameters& parameters)
    : members_(std::move(members)),
      factor_(parameters[members_.front()].factor),
      slots_(members_.size()),
      layout_(parameters[members_.front()].layout) {
  for (const std::size_t member : members_) bytes_ += parameters[member].tensor.nbytes();
}

void Bucket::lay_out(const Parameters& parameters, const Rule& rule) {
  if (laid_out_for_ == rule.hook.get()) return;
  std::int64_t size = 0;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const Parameter& parameter = parameters[members_[i]];
    const bool is_own = rule.is_own(parameter.gradient_bytes());
    slots_[i].offset = is_own ? -1 : size;
    if (!is_own) size += parameter.tensor.numel();
  }
  const Parameter& first = parameters[members_.front()];
  flat_ = allocate(rule, size, first.tensor, first.gradient_type());
  laid_out_for_ = rule.hook.get();
}

bool Bucket::lies_in_slot(const Parameter& parameter, const Slot& slot) const {
  const at::Tensor& now = parameter.tensor.grad();
  if (!shares_storage(now, flat_) || now.storage_offset() != flat_.storage_offset() + slot.offset) {
    return false;
  }
  return parameter.tensor.is_non_overlapping_and_dense()
             ? now.strides() == parameter.tensor.strides()
             : now.is_contiguous();
}

/// True if the gradient is reduced where it is.
bool Bucket::lies_in_place(const Parameter& parameter, const Slot& slot) const {
  if (slot.offset >= 0) return lies_in_slot(parameter, slot);
  const at::Tensor& now = parameter.tensor.grad();
  return now.defined() && parameter.lies_as_parameter() && now.is_non_overlapping_and_dense() &&
         is_in_heap(now);
}

/// A tensor where the gradient is reduced.
at::Tensor Bucket::make_place(const Parameter& parameter, const Slot& slot,
                              const Rule& rule) const {
  const at::Tensor& like = parameter.tensor;
  if (slot.offset >= 0) return alias(flat_, slot.offset, like);
  return alias(allocate(rule, like.numel(), like, parameter.gradient_type()), 0, like);
}

/// Before gradients are written to the flat tensor from elsewhere.
void Bucket::renew_if_kept(const Parameters& parameters, const Rule& rule) {
  if (flat_.numel() == 0) return;
  std::size_t users = 0;
  std::size_t writes = 0;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (slots_[i].offset < 0) continue;
    const Parameter& member = parameters[members_[i]];
    if (shares_storage(member.tensor.grad(), flat_)) ++users;
    if (!lies_in_slot(member, slots_[i])) ++writes;
  }
  if (writes == 0 || owns_memory(flat_, users)) return;
  flat_ = allocate(rule, flat_.numel(), flat_, flat_.scalar_type());
}

void Bucket::copy(const at::Tensor& to, const at::Tensor& from) {
  copy_into_place(to, from);
  copied_ += to.nbytes();
}

/// Brings what takes part to where it is reduced, and gives it.
at::Tensor Bucket::contribute(Parameter& parameter, Slot& slot, const Rule& rule, bool zeros) {
  at::Tensor& now = parameter.grad();
  slot.stand_in = slot.result = slot.kept = at::Tensor();
  const bool stands_in = zeros || !parameter.touched || !now.defined();
  const bool in_place = lies_in_place(parameter, slot);
  if (in_place && !stands_in) return now;
  // A large stand-in gets memory of its own; a small one has the slot's.
  const bool keeps = in_place && slot.offset >= 0;
  if (keeps) slot.kept = now.clone();
  at::Tensor place = keeps ? now : make_place(parameter, slot, rule);
  if (zeros || !now.defined()) {
    place.zero_();
  } else if (!keeps) {
    copy(place, now);
  }
  if (stands_in) {
    slot.stand_in = place;
  } else if (parameter.is_fresh()) {
    now = place;
  } else {
    slot.result = place;
  }
  return place;
}

std::vector<at::Tensor> Bucket::place(Parameters& parameters, const Rule& rule) {
  const at::NoGradGuard no_grad;
  copied_ = 0;
  lay_out(parameters, rule);
  renew_if_kept(parameters, rule);
  std::vector<at::Tensor> placed(members_.size());
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Parameter& parameter = parameters[members_[i]];
    if (!parameter.touched || !parameter.is_local() || parameter.tensor.numel() == 0) continue;
    at::Tensor& now = parameter.grad();
    placed[i] = now;
    if (lies_in_place(parameter, slots_[i])) continue;
    placed[i] = make_place(parameter, slots_[i], rule);
    copy(placed[i], now);
    // A gradient that the script has given, or changed, stays where the script has it.
    if (!parameter.is_fresh() || !parameter.seen.is_unchanged(now)) continue;
    now = placed[i];
    parameter.seen.set(now);
  }
  return placed;
}

void Bucket::launch(Parameters& parameters, const Rule& rule, std::size_t index, std::size_t count,
                    bool zeros) {
  const at::NoGradGuard no_grad;
  parts_.clear();
  copied_ = 0;
  if (rule.row.of_rest() == Move::kSumRows) return launch_scatter(parameters, rule);
  if (layout_ == at::kSparse) {
    const at::Tensor& only = parameters[members_.front()].tensor;
    parts_.push_back(!zeros && only.grad().defined() ? only.grad() : no_rows(only));
  } else {
    lay_out(parameters, rule);
    renew_if_kept(parameters, rule);
    if (flat_.numel() > 0) parts_.push_back(flat_);
    for (std::size_t i = 0; i < members_.size(); ++i) {
      const at::Tensor part = contribute(parameters[members_[i]], slots_[i], rule, zeros);
      if (slots_[i].offset < 0) parts_.push_back(in_memory_order(part));
    }
    if (rule.hook) return run_hook(parameters, rule, index, count);
  }
  if (parts_.empty()) return;  // all members are empty, on all ranks
  work_ =
      all_reduce(rule.group, parts_,
                 layout_ == at::kSparse ? c10d::ReduceOp(c10d::ReduceOp::SUM) : rule.op(factor_));
}

void Bucket::run_hook(const Parameters& parameters, const Rule& rule, std::size_t index,
                      std::size_t count) {
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> lengths;
  std::vector<c10::IntArrayRef> shapes;
  std::vector<at::Tensor> members;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const at::Tensor& parameter = parameters[members_[i]].tensor;
    offsets.push_back(static_cast<std::size_t>(slots_[i].offset));
    lengths.push_back(static_cast<std::size_t>(parameter.numel()));
    shapes.push_back(parameter.sizes());
    members.push_back(parameter);
  }
  c10d::GradBucket bucket(index, count, flat_, std::move(offsets), std::move(lengths),
                          std::move(shapes), std::move(members), std::nullopt);
  future_ = rule.hook->runHook(bucket);
}

/// Does what the collective has left: makes an average of a sum, or scales it.
void Bucket::scale(const Rule& rule, at::Tensor& part) const {
  const double factor = rule.factor_or(factor_);
  const bool is_divided = rule.takes_average(factor_) && layout_ != at::kSparse;
  const double divisor = is_divided ? 1 : rule.sum_divisor(factor_);
  if (divisor != 1) part.div_(divisor);
  if (factor != 0 && factor != 1) part.mul_(factor);
}

void Bucket::settle(Parameters& parameters, const Rule& rule, const std::vector<bool>& touched) {
  const at::NoGradGuard no_grad;
  if (rule.row.of_rest() == Move::kSumRows) {
    complete_scatter(parameters, rule);
    if (!rule.heaps) settle_rows(parameters, rule, touched);
    return;
  }
  if (const auto future = std::exchange(future_, nullptr)) {
    future->wait();
    const at::Tensor result = rule.hook->parseHookResult(future->value());
    if (!same_place(result.view({-1}), flat_)) flat_.copy_(result.view({-1}));
  } else if (const auto work = std::exchange(work_, nullptr)) {
    work->wait();
    if (layout_ == at::kSparse) parts_ = work->result();
    for (at::Tensor& part : parts_) scale(rule, part);
  }
  for (std::size_t i = 0; i < members_.size(); ++i) {
    settle_member(parameters[members_[i]], slots_[i], touched[members_[i]]);
  }
  parts_.clear();
}

void Bucket::settle_member(Parameter& parameter, Slot& slot, bool touched) {
  const at::Tensor stand_in = std::exchange(slot.stand_in, at::Tensor());
  const at::Tensor result = std::exchange(slot.result, at::Tensor());
  const at::Tensor kept = std::exchange(slot.kept, at::Tensor());
  if (!touched) {
    if (kept.defined()) stand_in.copy_(kept);
    return;
  }
  at::Tensor& now = parameter.grad();
  if (parameter.is_sparse()) {
    now = parts_.front();
  } else if (result.defined()) {
    now.copy_(result);
  } else if (stand_in.defined() && now.defined()) {
    if (!now.is_same(stand_in)) now.copy_(stand_in);
  } else if (stand_in.defined()) {
    now = stand_in;
  }
  if (parameter.widens) now = now.to(parameter.tensor.scalar_type());
  parameter.mark_reduced();
}

bool Bucket::await_calls() const {
  if (work_) work_->wait();
  for (const RowsPart& part : rows_) {
    if (part.work) part.work->wait();
  }
  return work_ || !rows_.empty();
}

void Bucket::drop() {
  try {
    if (work_) work_->wait();
    for (const RowsPart& part : rows_) {
      if (part.work) part.work->wait();
    }
    if (future_) future_->wait();
  } catch (const std::exception&) {  // the pass has failed already, with an error that was told
    work_ = nullptr;
  }
  work_ = nullptr;
  future_ = nullptr;
  pass_ = nullptr;
  rows_.clear();
  parts_.clear();
  const at::NoGradGuard no_grad;
  for (Slot& slot : slots_) {
    if (slot.kept.defined()) slot.stand_in.copy_(slot.kept);
    slot.stand_in = slot.result = slot.kept = at::Tensor();
  }
}

}  // namespace dreamcomm

#include "c10d/gradients/gradient_bucket.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "c10d/gradients/ownership.h"
#include "c10d/process/process_heap.h"

namespace dreamcomm {
namespace {

/// Another tensor on the flat tensor's memory, in the order in which the parameter has its
/// elements. No view of autograd: it has a version of its own, and may be detached. Made without
/// torch's dispatch, which takes longer than to reduce a small gradient.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(flat.storage()),
                                                             flat.key_set(), flat.dtype());
  c10::TensorImpl& impl = *made.unsafeGetTensorImpl();
  const std::int64_t begin = flat.storage_offset() + offset;
  if (like.is_non_overlapping_and_dense()) {
    impl.set_sizes_and_strides(like.sizes(), like.strides(), begin);
  } else {
    impl.set_sizes_contiguous(like.sizes());
    impl.set_storage_offset(begin);
  }
  return made;
}

/// Memory that the group's backend reduces without a copy, where it has such.
at::Tensor allocate(const BucketRule& rule, std::int64_t size, const at::TensorOptions& options) {
  const c10::Device device = options.device();
  const auto backend = rule.group->getBackend(device.type());
  // The CPU's device has no index: -1.
  if (size == 0 || !backend->supportsTensorAlloc(device.index())) return at::empty({size}, options);
  return backend->allocateTensor(static_cast<long>(size), options);
}

at::TensorOptions plain_options(const at::Tensor& parameter) {
  return at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device());
}

bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.strides() == b.strides();
}

/// A plain copy is not worth torch's dispatch for a small tensor.
void copy_into_place(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_cpu() && from.is_cpu() && to.is_contiguous() && from.is_contiguous() &&
      to.scalar_type() == from.scalar_type() && !from.is_neg() && !from.is_conj()) {
    if (to.numel() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    return;
  }
  to.copy_(from);
}

/// The gradient's elements one after the other, in the order in which they lie in memory.
at::Tensor in_memory_order(const at::Tensor& gradient) {
  return gradient.as_strided({gradient.numel()}, {1});
}

at::Tensor no_rows(const at::Tensor& parameter) {
  const at::TensorOptions options = plain_options(parameter);
  std::vector<std::int64_t> shape = parameter.sizes().vec();
  shape[0] = 0;
  return at::_sparse_coo_tensor_unsafe(at::zeros({1, 0}, options.dtype(at::kLong)),
                                       at::zeros(shape, options), parameter.sizes(), options);
}

}  // namespace

GradientBucket::GradientBucket(std::vector<std::size_t> members, const Gradients& gradients)
    : members_(std::move(members)),
      slots_(members_.size()),
      sparse_(gradients[members_.front()].sparse) {
  for (const std::size_t member : members_) bytes_ += gradients[member].parameter.nbytes();
}

void GradientBucket::lay_out(const Gradients& gradients, const BucketRule& rule) {
  if (laid_out_ && laid_out_for_ == rule.hook.get()) return;
  std::int64_t size = 0;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const at::Tensor& parameter = gradients[members_[i]].parameter;
    const bool own = rule.own_bytes > 0 && !rule.hook && parameter.nbytes() >= rule.own_bytes;
    slots_[i].offset = own ? -1 : size;
    if (!own) size += parameter.numel();
  }
  const at::Tensor& first = gradients[members_.front()].parameter;
  flat_ = allocate(rule, size, plain_options(first));
  laid_out_ = true;
  laid_out_for_ = rule.hook.get();
}

bool GradientBucket::lies_in_slot(const at::Tensor& gradient, const Slot& slot,
                                  const at::Tensor& parameter) const {
  if (!shares_storage(gradient, flat_) ||
      gradient.storage_offset() != flat_.storage_offset() + slot.offset) {
    return false;
  }
  return parameter.is_non_overlapping_and_dense() ? gradient.strides() == parameter.strides()
                                                  : gradient.is_contiguous();
}

/// Before gradients are written to the flat tensor from elsewhere.
void GradientBucket::renew_if_kept(const Gradients& gradients, const BucketRule& rule) {
  if (flat_.numel() == 0) return;
  std::size_t users = 0;
  bool writes = false;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (slots_[i].offset < 0) continue;
    const at::Tensor& now = gradients[members_[i]].parameter.grad();
    if (shares_storage(now, flat_)) ++users;
    if (!lies_in_slot(now, slots_[i], gradients[members_[i]].parameter)) writes = true;
  }
  if (!writes || owns_memory(flat_, users)) return;
  flat_ = allocate(rule, flat_.numel(), flat_.options());
}

void GradientBucket::copy(const at::Tensor& to, const at::Tensor& from) {
  copy_into_place(to, from);
  copied_ += to.nbytes();
}

void GradientBucket::contribute_to_flat(Gradient& gradient, Slot& slot, bool zeros) {
  at::Tensor& now = gradient.tensor();
  const bool stands_in = zeros || !gradient.touched || !now.defined();
  const bool in_place = lies_in_slot(now, slot, gradient.parameter);
  at::Tensor view = in_place ? now : alias(flat_, slot.offset, gradient.parameter);
  if (stands_in && in_place) slot.kept = now.clone();
  if (zeros || !now.defined()) {
    view.zero_();
  } else {
    if (!in_place) copy(view, now);
    if (!stands_in && gradient.is_fresh()) now = view;
  }
  if (stands_in) {
    slot.stand_in = std::move(view);
  } else if (!now.is_same(view)) {
    slot.result = std::move(view);
  }
}

at::Tensor GradientBucket::contribution(Gradient& gradient, Slot& slot, const BucketRule& rule,
                                        bool zeros) {
  at::Tensor& now = gradient.tensor();
  const bool stands_in = zeros || !gradient.touched || !now.defined();
  slot.stand_in = slot.result = slot.kept = at::Tensor();
  if (slot.offset >= 0) {
    contribute_to_flat(gradient, slot, zeros);
    return {};
  }
  if (!stands_in && gradient.lies_as_parameter() && now.is_non_overlapping_and_dense() &&
      is_in_heap(now)) {
    return in_memory_order(now);
  }
  const at::Tensor memory =
      allocate(rule, gradient.parameter.numel(), plain_options(gradient.parameter));
  const at::Tensor placed = alias(memory, 0, gradient.parameter);
  if (zeros || !now.defined()) {
    placed.zero_();
  } else {
    copy(placed, now);
  }
  if (stands_in) {
    slot.stand_in = placed;
  } else if (gradient.is_fresh()) {
    now = placed;
  } else {
    slot.result = placed;
  }
  return memory;
}

at::Tensor GradientBucket::local_in_heap(Gradient& gradient, const Slot& slot,
                                         const BucketRule& rule) {
  at::Tensor& now = gradient.tensor();
  if (slot.offset >= 0 && lies_in_slot(now, slot, gradient.parameter)) return now;
  if (slot.offset < 0 && gradient.lies_as_parameter() && now.is_non_overlapping_and_dense() &&
      is_in_heap(now)) {
    return now;
  }
  const at::Tensor placed =
      slot.offset >= 0 ? alias(flat_, slot.offset, gradient.parameter)
                       : alias(allocate(rule, now.numel(), plain_options(gradient.parameter)), 0,
                               gradient.parameter);
  copy(placed, now);
  // What the script has given, or changed, stays where the script has it.
  if (gradient.is_fresh() && gradient.is_as_seen()) {
    now = placed;
    gradient.mark_seen();
  }
  return placed;
}

void GradientBucket::launch(Gradients& gradients, const BucketRule& rule, std::size_t index,
                            std::size_t count, bool zeros) {
  const at::NoGradGuard no_grad;
  parts_.clear();
  copied_ = 0;
  if (rule.sharded) return launch_sharded(gradients, rule);
  if (sparse_) {
    const Gradient& only = gradients[members_.front()];
    const bool takes_part = !zeros && only.tensor().defined();
    parts_.push_back(takes_part ? only.tensor() : no_rows(only.parameter));
  } else {
    lay_out(gradients, rule);
    renew_if_kept(gradients, rule);
    if (flat_.numel() > 0) parts_.push_back(flat_);
    for (std::size_t i = 0; i < members_.size(); ++i) {
      at::Tensor own = contribution(gradients[members_[i]], slots_[i], rule, zeros);
      if (own.defined()) parts_.push_back(std::move(own));
    }
  }
  start(gradients, rule, index, count);
}

void GradientBucket::start(const Gradients& gradients, const BucketRule& rule, std::size_t index,
                           std::size_t count) {
  if (rule.hook && !sparse_) {
    std::vector<std::size_t> offsets;
    std::vector<std::size_t> lengths;
    std::vector<c10::IntArrayRef> shapes;
    std::vector<at::Tensor> parameters;
    for (std::size_t i = 0; i < members_.size(); ++i) {
      const at::Tensor& parameter = gradients[members_[i]].parameter;
      offsets.push_back(static_cast<std::size_t>(slots_[i].offset));
      lengths.push_back(static_cast<std::size_t>(parameter.numel()));
      shapes.push_back(parameter.sizes());
      parameters.push_back(parameter);
    }
    c10d::GradBucket bucket(index, count, flat_, std::move(offsets), std::move(lengths),
                            std::move(shapes), std::move(parameters), std::nullopt);
    future_ = rule.hook->runHook(bucket);
    return;
  }
  if (parts_.empty()) return;  // all members are empty, on all ranks
  const bool average = rule.averages && rule.factor == 0 && rule.divisor == 0 && !sparse_;
  const c10d::ReduceOp op = average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
  if (parts_.size() == 1) {
    c10d::AllreduceOptions opts;
    opts.reduceOp = op;
    opts.asyncOp = true;
    work_ = rule.group->allreduce(parts_, opts);
    return;
  }
  c10d::AllreduceCoalescedOptions opts;
  opts.reduceOp = op;
  opts.asyncOp = true;
  work_ = rule.group->allreduce_coalesced(parts_, opts);
}

/// What the collective has left to do: a sum becomes an average, or is scaled.
void GradientBucket::scale(const BucketRule& rule) {
  if (rule.factor == 1) return;
  if (rule.factor != 0) {
    for (at::Tensor& part : parts_) part.mul_(rule.factor);
    return;
  }
  if (rule.averages && rule.divisor == 0 && !sparse_) return;
  const std::int64_t ranks = rule.divisor > 0 ? rule.divisor : rule.group->getSize();
  for (at::Tensor& part : parts_) part.div_(ranks);
}

void GradientBucket::settle(Gradients& gradients, const BucketRule& rule,
                            const std::vector<bool>& touched) {
  const at::NoGradGuard no_grad;
  if (rule.sharded) return settle_sharded(gradients, rule, touched);
  if (future_) {
    const auto future = std::exchange(future_, nullptr);
    future->wait();
    const at::Tensor result = rule.hook->parseHookResult(future->value());
    if (!same_place(result.view({-1}), flat_)) flat_.copy_(result.view({-1}));
  } else if (const auto work = std::exchange(work_, nullptr)) {
    work->wait();
    if (sparse_) parts_ = work->result();
    scale(rule);
  }
  for (std::size_t i = 0; i < members_.size(); ++i) {
    settle_member(gradients[members_[i]], slots_[i], touched[members_[i]]);
  }
  parts_.clear();
}

void GradientBucket::settle_member(Gradient& gradient, Slot& slot, bool touched) {
  const at::Tensor stand_in = std::exchange(slot.stand_in, at::Tensor());
  const at::Tensor result = std::exchange(slot.result, at::Tensor());
  const at::Tensor kept = std::exchange(slot.kept, at::Tensor());
  if (!touched) {
    if (kept.defined()) stand_in.copy_(kept);
    return;
  }
  at::Tensor& now = gradient.tensor();
  if (sparse_) {
    now = parts_.front();
  } else if (result.defined()) {
    now.copy_(result);
  } else if (stand_in.defined() && now.defined()) {
    if (!now.is_same(stand_in)) now.copy_(stand_in);
  } else if (stand_in.defined()) {
    now = stand_in;
  }
  gradient.mark_reduced();
}

void GradientBucket::drop() {
  try {
    if (work_) work_->wait();
    if (future_) future_->wait();
  } catch (const std::exception&) {  // the pass has failed already, with an error that was told
    work_ = nullptr;
  }
  work_ = nullptr;
  future_ = nullptr;
  pass_ = nullptr;
  parts_.clear();
  const at::NoGradGuard no_grad;
  for (Slot& slot : slots_) {
    if (slot.kept.defined()) slot.stand_in.copy_(slot.kept);
    slot.stand_in = slot.result = slot.kept = at::Tensor();
  }
}

}  // namespace dreamcomm

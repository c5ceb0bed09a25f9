// A parameter of a module that is trained by several ranks, and the state of its gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "c10d/gradients/shard.h"

namespace dreamcomm {

struct Gradient {
  at::Tensor parameter;
  std::string name;
  bool sparse = false;  // its gradients are sparse tensors

  // Keeps the hook. torch 2.13 has another pointer here than those before.
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
  std::uintptr_t hook = 0;
  std::size_t bucket = 0;
  int expected = 0;  // how often autograd makes it in a pass, as the first pass has shown
  int made = 0;      // how often it has in this one

  // When the pass began: the gradient that was there, and the parameter's version.
  c10::weak_intrusive_ptr<c10::TensorImpl> before{c10::intrusive_ptr<c10::TensorImpl>()};
  std::uint32_t parameter_version = 0;
  // What the buckets were planned for.
  at::ScalarType type = at::kFloat;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;

  bool mixed = false;    // a part of it was reduced, and a later one was not
  bool touched = false;  // autograd has added to it since it was reduced last
  bool stale = false;    // this pass adds to what the last reduction left
  // The tensor that the last reduction left as the gradient, and its version then. A weak pointer:
  // no other tensor gets its address while it is kept.
  c10::weak_intrusive_ptr<c10::TensorImpl> reduced{c10::intrusive_ptr<c10::TensorImpl>()};
  std::uint32_t reduced_version = 0;
  // The same of what autograd has left, where gradients stay local until the step.
  c10::weak_intrusive_ptr<c10::TensorImpl> seen{c10::intrusive_ptr<c10::TensorImpl>()};
  std::uint32_t seen_version = 0;

  Shard shard;  // where gradients are sharded

  at::Tensor& tensor() const { return parameter.mutable_grad(); }
  /// Whether it is what the last reduction left, and nothing was written to it since.
  bool is_as_reduced() const { return is_reduced() && version() == reduced_version; }
  bool is_reduced() const {
    const at::Tensor& now = parameter.grad();
    return now.defined() && now.unsafeGetTensorImpl() == reduced._unsafe_get_target();
  }
  bool is_stand_in() const {
    return shard.stand_in.defined() && parameter.grad().is_same(shard.stand_in);
  }
  /// Whether there is a gradient of this rank alone.
  bool is_local() const { return parameter.grad().defined() && !is_stand_in(); }
  /// Whether the gradient's elements lie in memory as the parameter's do.
  bool lies_as_parameter() const {
    const at::Tensor& now = parameter.grad();
    return now.strides() == parameter.strides() ||
           (now.is_contiguous() && parameter.is_contiguous());
  }
  /// A rank's elements, in the order of memory: rows lie one after the other.
  ShardRange elements(int world, int rank) const {
    if (shard.replicated) return {0, parameter.numel()};
    const std::int64_t rows = parameter.size(0);
    return rows_of_rank(rows, rows == 0 ? 0 : parameter.numel() / rows, world, rank);
  }
  /// Whether it is what the last reduction of all gradients left, or is still missing.
  bool is_unchanged() const {
    return parameter.grad().defined() ? is_as_reduced() : reduced._unsafe_get_target() == nullptr;
  }
  /// Notes what is there when a pass begins.
  void mark_begun() {
    made = 0;
    mark_before();
    parameter_version = parameter._version();
  }
  /// Whether this pass has begun the gradient. One that was there before is the script's: it keeps
  /// its tensor, as other tensors may be on its memory.
  bool is_fresh() const {
    const at::Tensor& now = parameter.grad();
    return now.defined() && now.unsafeGetTensorImpl() != before._unsafe_get_target();
  }
  void mark_before() {
    before = c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.grad().getIntrusivePtr());
  }
  void forget_before() {
    before = c10::weak_intrusive_ptr<c10::TensorImpl>(c10::intrusive_ptr<c10::TensorImpl>());
  }
  /// Brings a gradient that the pass has begun into memory of its own, if other tensors have its
  /// memory, too. `arrived`: what autograd has made it of, which ends with the call.
  /// Returns the bytes that it has copied.
  std::size_t set_apart(const at::Tensor& arrived);
  /// Notes what the parameter is now, for is_as_planned().
  void mark_planned();
  /// Whether the parameter still has the node with the hook, and its type, shape and strides.
  bool is_as_planned() const;
  /// Notices that what this rank has added up was discarded since: by None, by zeros, or by another
  /// tensor. What a shard holds of it counts no more then.
  void notice_cleared();
  std::uint32_t version() const { return parameter.grad()._version(); }
  /// Notes the gradient that autograd has left.
  void mark_seen() {
    const at::Tensor& now = parameter.grad();
    seen = c10::weak_intrusive_ptr<c10::TensorImpl>(now.getIntrusivePtr());
    seen_version = version();
  }
  bool was_seen() const { return seen._unsafe_get_target() != nullptr; }
  bool is_as_seen() const {
    const at::Tensor& now = parameter.grad();
    return now.defined() && now.unsafeGetTensorImpl() == seen._unsafe_get_target() &&
           version() == seen_version;
  }
  void mark_reduced() {
    touched = stale = mixed = false;
    const at::Tensor& now = parameter.grad();
    reduced = c10::weak_intrusive_ptr<c10::TensorImpl>(now.getIntrusivePtr());
    reduced_version = now.defined() ? version() : 0;
  }
};

/// Whether a gradient was cleared in place. A zero of -0.0 counts as another number.
bool is_zero(const at::Tensor& gradient);

}  // namespace dreamcomm

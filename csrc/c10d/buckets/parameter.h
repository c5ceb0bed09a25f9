// A parameter of a bucket, and the state of its gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "c10d/buckets/layout.h"

namespace dreamcomm {

/// A tensor and its version at a moment. A weak pointer: no other tensor gets its address while it
/// is kept.
class TensorMark {
 public:
  void set(const at::Tensor& tensor) {
    tensor_ = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
    version_ = tensor.defined() ? tensor._version() : 0;
  }
  void forget() { set(at::Tensor()); }
  bool is_set() const { return tensor_._unsafe_get_target() != nullptr; }
  /// True if that tensor was marked.
  bool is_of(const at::Tensor& now) const {
    return now.defined() && now.unsafeGetTensorImpl() == tensor_._unsafe_get_target();
  }
  /// True if it was, and nothing was written to it since.
  bool is_unchanged(const at::Tensor& now) const {
    return is_of(now) && now._version() == version_;
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor_{c10::intrusive_ptr<c10::TensorImpl>()};
  std::uint32_t version_ = 0;
};

/// This rank's rows of a gradient, where gradients are sharded.
struct GradientShard {
  enum class Content : std::uint8_t {
    kNothing,
    kAverage,
    kSummand,  // the next reduction is added to it
  };
  at::ScalarType sum_type = at::kFloat;
  /// The parameter's `grad` after it is reduced; undefined: it stays.
  at::Tensor stand_in;
  /// True if parameters are sharded, too: the script then has the gradient on another tensor than
  /// the parameter, whose own `grad` is what this rank alone has added up. A reduction is added to
  /// the content, if there is any; the script's clearing of it is what ShardedGradients::hold says.
  bool apart = false;
  /// This rank's elements of the average, flat, in `sum_type`; made by the first reduction.
  at::Tensor gradient;
  Content content = Content::kNothing;

  bool is_held() const { return content != Content::kNothing; }
  /// Memory for `count` elements of the next average. With `apart` the script may have kept an
  /// average that counts no more: that one stays as it is.
  at::Tensor next_memory(std::int64_t count, c10::Device device) const;
  bool adds() const { return content == Content::kSummand; }
  void set_adds(bool adds) {
    if (adds || content == Content::kSummand)
      content = adds ? Content::kSummand : Content::kAverage;
  }
};

struct Parameter {
  /// The parts that a gradient consists of.
  enum class Mix : std::uint8_t {
    kNone,
    kReduced,  // what the last reduction left: this pass may not add to it without notice
    kMixed,    // a part of it was reduced, and a later one was not
  };

  at::Tensor tensor;
  std::string name;
  at::Layout layout = at::kStrided;  // of its gradient: kStrided, or kSparse
  std::size_t bucket = 0;
  double factor = 0;  // as Rule::factor; 0: the rule's
  /// True if gradients of 16 bits are summed in float32 over shards, and rounded at the end.
  bool widens = false;

  // Keeps the hooks. torch 2.13 has another pointer here than those before.
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
  int expected = 0;  // how often autograd makes the gradient in a pass, as the first pass has shown
  int made = 0;      // how often it has in this one

  bool touched = false;  // autograd has added to the gradient since it was reduced last
  Mix mix = Mix::kNone;
  TensorMark before;          // the gradient that was there when the pass began
  TensorMark reduced;         // the gradient that the last reduction left
  TensorMark seen;            // the gradient that autograd left, where gradients are sharded
  std::uint32_t version = 0;  // the parameter's, when the pass began
  // The parameter for which the buckets were planned.
  at::ScalarType planned_type = at::kFloat;
  std::vector<std::int64_t> planned_sizes;
  std::vector<std::int64_t> planned_strides;

  GradientShard shard;

  at::Tensor& grad() const { return tensor.mutable_grad(); }
  bool is_sparse() const { return layout == at::kSparse; }
  bool is_as_reduced() const { return reduced.is_unchanged(tensor.grad()); }
  bool is_reduced() const { return reduced.is_of(tensor.grad()); }
  /// True if the gradient is in the shard alone.
  bool is_stand_in() const {
    if (shard.apart) return shard.is_held() && !tensor.grad().defined();
    return shard.stand_in.defined() && tensor.grad().is_same(shard.stand_in);
  }
  /// True if there is a gradient of this rank alone.
  bool is_local() const { return tensor.grad().defined() && !is_stand_in(); }
  /// The type of gradients that autograd makes: torch's grad_dtype, where parameters are sharded.
  at::ScalarType autograd_type() const {
    const at::ScalarType own = tensor.scalar_type();
    return shard.apart ? tensor.grad_dtype().value_or(own) : own;
  }
  /// The type in which gradients are reduced.
  at::ScalarType gradient_type() const { return widens ? at::kFloat : autograd_type(); }
  std::size_t gradient_bytes() const {
    return static_cast<std::size_t>(tensor.numel()) * c10::elementSize(gradient_type());
  }
  /// True if the gradient's elements lie in memory as the parameter's do.
  bool lies_as_parameter() const {
    const at::Tensor& now = tensor.grad();
    return now.strides() == tensor.strides() || (now.is_contiguous() && tensor.is_contiguous());
  }
  /// A rank's elements, in the order of memory: rows lie one after the other.
  RankRange elements(int world, int rank) const {
    return elements_of_rank(tensor.sizes(), world, rank);
  }
  /// True if the gradient is what the last reduction of all left, or is still missing.
  bool is_unchanged() const {
    return tensor.grad().defined() ? is_as_reduced() : !reduced.is_set();
  }
  /// Notes what is there when a pass begins.
  void mark_begun() {
    made = 0;
    before.set(tensor.grad());
    version = tensor._version();
  }
  /// True if this pass has begun the gradient. One that was there before is the script's: it keeps
  /// its tensor, as other tensors may be on its memory.
  bool is_fresh() const { return tensor.grad().defined() && !before.is_of(tensor.grad()); }
  /// Brings a gradient that the pass has begun into memory of its own, if other tensors have its
  /// memory, too. `arrived`: what autograd has made it of, which ends with the call.
  /// Returns the bytes that it has copied.
  std::size_t set_apart(const at::Tensor& arrived);
  /// Notes what the parameter is now, for is_as_planned().
  void mark_planned();
  /// True if the parameter still has the node with the hooks, and its type, shape and strides.
  bool is_as_planned() const;
  /// Notices that what this rank has added up was discarded since: by None, by zeros, or by another
  /// tensor. A shard's part of it counts no more then.
  void notice_cleared();
  /// Throws unless the gradient has the layout and type that are expected. `who`: "rank 1 of 2".
  void require_layout(const std::string& who, bool is_sharded) const;
  void mark_reduced() {
    touched = false;
    mix = Mix::kNone;
    reduced.set(tensor.grad());
  }
};

using Parameters = std::vector<Parameter>;

/// True if a gradient was cleared in place. A zero of -0.0 counts as another number.
bool is_zero(const at::Tensor& gradient);

}  // namespace dreamcomm

// A parameter of a module that is trained by several ranks, and the state of its gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <string>

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

  bool mixed = false;    // a part of it was reduced, and a later one was not
  bool touched = false;  // autograd has added to it since it was reduced last
  bool stale = false;    // this pass adds to what the last reduction left
  // The tensor that the last reduction left as the gradient, and its version then. A weak pointer:
  // no other tensor gets its address while it is kept.
  c10::weak_intrusive_ptr<c10::TensorImpl> reduced{c10::intrusive_ptr<c10::TensorImpl>()};
  std::uint32_t reduced_version = 0;

  at::Tensor& tensor() const { return parameter.mutable_grad(); }
  /// Whether it is what the last reduction left, and nothing was written to it since.
  bool is_as_reduced() const { return is_reduced() && version() == reduced_version; }
  bool is_reduced() const {
    const at::Tensor& now = parameter.grad();
    return now.defined() && now.unsafeGetTensorImpl() == reduced._unsafe_get_target();
  }
  std::uint32_t version() const { return parameter.grad()._version(); }
  void mark_reduced() {
    touched = stale = mixed = false;
    const at::Tensor& now = parameter.grad();
    reduced = c10::weak_intrusive_ptr<c10::TensorImpl>(now.getIntrusivePtr());
    reduced_version = now.defined() ? version() : 0;
  }
};

}  // namespace dreamcomm

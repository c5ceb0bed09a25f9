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

  bool touched = false;  // autograd has added to it since it was reduced last
  // The gradient as the last reduction left it: its tensor, which is only compared, and version.
  const void* reduced = nullptr;
  std::uint32_t reduced_version = 0;

  at::Tensor& tensor() const { return parameter.mutable_grad(); }
  /// Whether it is what the last reduction left, and nothing was written to it since.
  bool is_as_reduced() const { return is_reduced() && version() == reduced_version; }
  bool is_reduced() const {
    const at::Tensor& now = parameter.grad();
    return reduced != nullptr && now.defined() && now.unsafeGetTensorImpl() == reduced;
  }
  std::uint32_t version() const { return parameter.grad()._version(); }
  void mark_reduced() {
    touched = false;
    const at::Tensor& now = parameter.grad();
    reduced = now.defined() ? now.unsafeGetTensorImpl() : nullptr;
    reduced_version = now.defined() ? version() : 0;
  }
};

}  // namespace dreamcomm

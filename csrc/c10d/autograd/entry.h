// Where received tensors enter an autograd graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace dreamcomm {

/// A node that has no inputs, and keeps the gradients that arrive at it. It keeps no tensor that
/// left it, so these are freed as soon as their users have dropped them.
class EntryNode final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "GraphEntry"; }

  /// The gradients that have arrived since the last call, one for each tensor; undefined ones where
  /// none has. After several backward passes they are their sums.
  std::vector<at::Tensor> take();

 private:
  std::vector<at::Tensor> arrived_;
};

/// torch's pointer to a node: a shared_ptr, and from torch 2.13 on an intrusive one.
using NodePtr = std::remove_cvref_t<decltype(std::declval<torch::autograd::Edge&>().function)>;

/// An entry with the pointer that keeps it.
struct GraphEntry {
  NodePtr node;
  EntryNode* entry = nullptr;
};

/// Aliases of the tensors whose history is one node. They are no leaves, and no views of leaves, so
/// they may be changed in place.
std::pair<std::vector<at::Tensor>, GraphEntry> enter(const std::vector<at::Tensor>& tensors);

}  // namespace dreamcomm

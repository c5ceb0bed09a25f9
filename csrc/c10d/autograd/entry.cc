#include "c10d/autograd/entry.h"

#include <ATen/ops/add.h>
#include <c10/core/GradMode.h>

namespace dreamcomm {
namespace {

/// The first pointer to a new node. An intrusive one counts from here: reclaim() would count one
/// owner too few, and the node would end while a graph still leads to it.
template <typename Pointer>
Pointer kept(EntryNode* node) {
  if constexpr (requires { Pointer::unsafe_steal_from_new(node); }) {
    return Pointer::unsafe_steal_from_new(node);
  } else {
    return Pointer(node);
  }
}

}  // namespace

torch::autograd::variable_list EntryNode::apply(torch::autograd::variable_list&& gradients) {
  const c10::AutoGradMode off(false);
  if (arrived_.empty()) arrived_.resize(gradients.size());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    arrived_[i] =
        arrived_[i].defined() ? at::add(arrived_[i], gradients[i]) : std::move(gradients[i]);
  }
  return {};
}

std::vector<at::Tensor> EntryNode::take() {
  std::vector<at::Tensor> taken = std::exchange(arrived_, {});
  taken.resize(num_inputs());
  return taken;
}

std::pair<std::vector<at::Tensor>, GraphEntry> enter(const std::vector<at::Tensor>& tensors) {
  auto* const entry = new EntryNode;
  const NodePtr node = kept<NodePtr>(entry);
  std::vector<at::Tensor> entered;
  entered.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    // A detached tensor shares the version counter: where its sender is in this process and has
    // saved it, a change in place is reported there.
    at::Tensor alias = tensor.detach();
    const auto number = entry->add_input_metadata(alias);
    torch::autograd::impl::set_gradient_edge(alias, {node, number});
    entered.push_back(std::move(alias));
  }
  return {std::move(entered), {node, entry}};
}

}  // namespace dreamcomm

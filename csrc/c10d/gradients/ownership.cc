#include "c10d/gradients/ownership.h"

#include <torch/csrc/autograd/variable.h>

namespace dreamcomm {
namespace {

/// Whether nothing in Python refers to the tensor's Python object, which counts as one reference to
/// the tensor from torch 2.10 on. Before it counts as none.
template <typename Slot>
bool has_unused_object(const Slot& slot) {
  if constexpr (requires { slot.has_unique_reference(); }) {
    return slot.has_unique_reference();
  } else {
    return false;
  }
}

}  // namespace

bool owns_memory(const at::Tensor& tensor, std::size_t known) {
  // Each tensor, and a Python object of the storage, counts once.
  return !tensor.has_storage() || tensor.storage().use_count() <= 1 + known;
}

std::size_t count_with_own_base(const at::Tensor& tensor) {
  const auto* const view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr || !view->has_bw_view()) return 1;
  const at::Tensor& base = view->get_backward_view().base_;
  const bool is_own =
      base.use_count() == 1 ||
      (base.use_count() == 2 && has_unused_object(*base.unsafeGetTensorImpl()->pyobj_slot()));
  return is_own ? 2 : 1;
}

bool shares_storage(const at::Tensor& one, const at::Tensor& other) {
  return one.defined() && other.defined() && one.has_storage() && other.has_storage() &&
         one.storage().is_alias_of(other.storage());
}

}  // namespace dreamcomm

#include "c10d/buckets/ownership.h"

#include <torch/csrc/autograd/variable.h>

namespace dreamcomm {
namespace {

/// True if nothing in Python refers to the Python object of a tensor or storage, which counts as
/// one reference to it from torch 2.10 on. Before it counts as none.
template <typename Slot>
bool has_unused_object(const Slot& slot) {
  if constexpr (requires { slot.has_unique_reference(); }) {
    return slot.has_unique_reference();
  } else {
    return false;
  }
}

/// True if nothing refers to the tensor except one reference of the caller.
bool has_one_reference(const at::Tensor& tensor) {
  return tensor.use_count() == 1 ||
         (tensor.use_count() == 2 &&
          has_unused_object(*tensor.unsafeGetTensorImpl()->pyobj_slot()));
}

}  // namespace

std::size_t count_with_own_base(const at::Tensor& tensor) {
  const auto* const view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr || !view->has_bw_view()) return 1;
  const at::Tensor& base = view->get_backward_view().base_;
  return has_one_reference(base) ? 2 : 1;
}

bool is_alone(const at::Tensor& tensor) { return has_one_reference(tensor) && owns_memory(tensor); }

bool owns_memory(const at::Tensor& tensor, std::size_t known) {
  if (!tensor.has_storage()) return true;
  const std::size_t users = tensor.storage().use_count();
  const std::size_t own = count_with_own_base(tensor) + known;
  if (users <= own) return true;
  // untyped_storage() leaves a Python object that lives on with the storage.
  return users == 1 + own &&
         has_unused_object(*tensor.storage().unsafeGetStorageImpl()->pyobj_slot());
}

bool shares_storage(const at::Tensor& one, const at::Tensor& other) {
  return one.defined() && other.defined() && one.has_storage() && other.has_storage() &&
         one.storage().is_alias_of(other.storage());
}

}  // namespace dreamcomm

#include "c10d/buckets/memory.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <vector>

namespace dreamcomm {
namespace {

at::TensorOptions plain_options(const at::Tensor& like) {
  return at::TensorOptions().dtype(like.scalar_type()).device(like.device());
}

}  // namespace

at::Tensor allocate(const Rule& rule, std::int64_t size, const at::Tensor& like,
                    at::ScalarType type) {
  const at::TensorOptions options = plain_options(like).dtype(type);
  const c10::Device device = like.device();
  const auto backend = rule.group->getBackend(device.type());
  // The CPU's device has no index: -1.
  if (size == 0 || !backend->supportsTensorAlloc(device.index())) return at::empty({size}, options);
  return backend->allocateTensor(static_cast<long>(size), options);
}

/// Made without torch's dispatch, which takes longer than to reduce a small gradient.
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

/// A plain copy is not worth torch's dispatch for a small tensor.
void copy_into_place(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_cpu() && from.is_cpu() && to.is_contiguous() && from.is_contiguous() &&
      to.scalar_type() == from.scalar_type() && !from.is_neg() && !from.is_conj()) {
    if (to.numel() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    return;
  }
  to.copy_(from);
}

at::Tensor no_rows(const at::Tensor& parameter) {
  const at::TensorOptions options = plain_options(parameter);
  std::vector<std::int64_t> shape = parameter.sizes().vec();
  shape[0] = 0;
  return at::_sparse_coo_tensor_unsafe(at::zeros({1, 0}, options.dtype(at::kLong)),
                                       at::zeros(shape, options), parameter.sizes(), options);
}

}  // namespace dreamcomm

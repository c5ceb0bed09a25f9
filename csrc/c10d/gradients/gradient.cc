#include "c10d/gradients/gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/count_nonzero.h>

#include <algorithm>
#include <cstdint>

#include "c10d/gradients/ownership.h"

namespace dreamcomm {
namespace {

/// Ends at the first element that is not zero.
template <typename T>
bool all_zero(const at::Tensor& flat) {
  const auto* const value = static_cast<const T*>(flat.const_data_ptr());
  return std::all_of(value, value + flat.nbytes() / sizeof(T), [](T one) { return one == T(0); });
}

}  // namespace

bool is_zero(const at::Tensor& gradient) {
  const bool plain =
      gradient.is_cpu() && !gradient.is_sparse() && gradient.is_non_overlapping_and_dense();
  if (!plain)
    return at::count_nonzero(gradient.is_sparse() ? gradient._values() : gradient)
               .item<std::int64_t>() == 0;
  const at::Tensor flat = gradient.as_strided({gradient.numel()}, {1});
  return flat.nbytes() % sizeof(std::uint64_t) == 0 ? all_zero<std::uint64_t>(flat)
                                                    : all_zero<std::uint8_t>(flat);
}

std::size_t Gradient::set_apart(const at::Tensor& arrived) {
  at::Tensor& now = tensor();
  // Autograd adds in place to a gradient that was there: other tensors on it follow, as in torch.
  if (!is_fresh()) return 0;
  const std::size_t ending = shares_storage(arrived, now) ? count_with_own_base(arrived) : 0;
  if (owns_memory(now, ending)) return 0;
  const at::NoGradGuard no_grad;
  now = now.clone();
  return now.nbytes();
}

void Gradient::mark_planned() {
  type = parameter.scalar_type();
  sizes = parameter.sizes().vec();
  strides = parameter.strides().vec();
}

bool Gradient::is_as_planned() const {
  if (accumulator && torch::autograd::impl::try_get_grad_accumulator(parameter) != accumulator)
    return false;
  return parameter.scalar_type() == type && parameter.sizes() == sizes &&
         parameter.strides() == strides;
}

void Gradient::notice_cleared() {
  if (!is_local()) {
    touched = false;
    return;
  }
  if (!shard.adds || !was_seen() || is_as_seen()) return;
  const bool is_another = tensor().unsafeGetTensorImpl() != seen._unsafe_get_target();
  if (is_another || is_zero(tensor())) shard.adds = false;
}

}  // namespace dreamcomm

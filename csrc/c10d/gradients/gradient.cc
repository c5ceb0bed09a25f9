#include "c10d/gradients/gradient.h"

#include <ATen/ops/count_nonzero.h>

#include <algorithm>
#include <cstdint>

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

#include "c10d/buckets/parameter.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "c10d/buckets/ownership.h"

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

at::Tensor GradientShard::next_memory(std::int64_t count, c10::Device device) const {
  const bool is_kept = apart && !adds() && gradient.defined() && !is_alone(gradient);
  if (gradient.defined() && !is_kept) return gradient;
  return at::empty({count}, at::TensorOptions().dtype(sum_type).device(device));
}

std::size_t Parameter::set_apart(const at::Tensor& arrived) {
  at::Tensor& now = grad();
  // Autograd adds in place to a gradient that was there: other tensors on it follow, as in torch.
  if (!is_fresh()) return 0;
  const std::size_t ending = shares_storage(arrived, now) ? count_with_own_base(arrived) : 0;
  if (owns_memory(now, ending)) return 0;
  const at::NoGradGuard no_grad;
  now = now.clone();
  return now.nbytes();
}

void Parameter::mark_planned() {
  planned_type = tensor.scalar_type();
  planned_sizes = tensor.sizes().vec();
  planned_strides = tensor.strides().vec();
}

bool Parameter::is_as_planned() const {
  if (!accumulator) return true;  // hooks were never on it
  return torch::autograd::impl::try_get_grad_accumulator(tensor) == accumulator &&
         tensor.scalar_type() == planned_type && tensor.sizes() == planned_sizes &&
         tensor.strides() == planned_strides;
}

void Parameter::notice_cleared() {
  if (!is_local()) {
    touched = false;
    return;
  }
  if (shard.apart || !shard.adds() || !seen.is_set() || seen.is_unchanged(grad())) return;
  if (!seen.is_of(grad()) || is_zero(grad())) shard.set_adds(false);
}

void Parameter::require_layout(const std::string& who, bool is_sharded) const {
  const at::Tensor& now = tensor.grad();
  if (!now.defined()) return;
  TORCH_CHECK(now.scalar_type() == autograd_type() || now.scalar_type() == gradient_type(), who,
              ": the gradient of '", name, "' is ", now.scalar_type(), ", expected ",
              autograd_type(), " as the parameter: leave grad_dtype as it is");
  if (now.is_sparse() == is_sparse()) return;
  TORCH_CHECK(!is_sharded, who, ": the gradient of parameter '", name,
              "' is sparse, and a sharded optimizer takes dense ones: leave sparse=True out");
  const char* const why =
      is_sparse()
          ? "a sparse one: its module has sparse=True, but the parameter is used elsewhere, too"
          : "a dense one: only those of torch.nn.Embedding and EmbeddingBag with sparse=True are "
            "expected to be sparse";
  TORCH_CHECK(false, who, ": the gradient of parameter '", name, "' is ",
              is_sparse() ? "dense" : "sparse", ", expected ", why);
}

}  // namespace dreamcomm

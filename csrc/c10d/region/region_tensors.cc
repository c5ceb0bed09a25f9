#include "c10d/region/region_tensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>

namespace dreamcomm {
namespace {

/// The bytes that the elements take, which a dense tensor has one after the other.
std::uint64_t dense_bytes(at::IntArrayRef sizes, at::ScalarType type) {
  const bool is_valid = std::all_of(sizes.begin(), sizes.end(), [](auto one) { return one >= 0; });
  std::uint64_t bytes = 0;
  const bool overflows = !is_valid || c10::safe_multiplies_u64(sizes, &bytes) ||
                         c10::mul_overflows(bytes, c10::elementSize(type), &bytes);
  TORCH_CHECK_VALUE(!overflows, "expected sizes from 0 on, of less than 2^64 bytes, got ", sizes,
                    " elements of ", type);
  return bytes;
}

}  // namespace

at::Tensor region_tensor(const std::shared_ptr<Region>& region, std::int64_t offset,
                         at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                         bool writable) {
  TORCH_CHECK_VALUE(!c10::isQIntType(type), "tensors of a region are not quantized, got ", type);
  TORCH_CHECK_VALUE(sizes.size() == strides.size(), "expected a stride for each of ", sizes.size(),
                    " dimensions, got ", strides.size());
  const std::uint64_t bytes = dense_bytes(sizes, type);
  const std::uint64_t room = region->bytes();
  const auto begin = static_cast<std::uint64_t>(offset);
  TORCH_CHECK_VALUE(offset >= 0 && begin <= room && bytes <= room - begin,
                    "expected a tensor within", " the ", room, " bytes of the region, got ", bytes,
                    " bytes from ", offset, " on");
  TORCH_CHECK_VALUE(begin % c10::elementSize(type) == 0,
                    "expected an offset that is a multiple of ", c10::elementSize(type),
                    " bytes, got ", offset);
  std::byte* const data = (writable ? region->data() : region->whole()) + begin;
  auto* const owner = new std::shared_ptr<Region>(region);
  at::Tensor made =
      at::for_blob(data, sizes)
          .strides(strides)
          .context(owner, [](void* held) { delete static_cast<std::shared_ptr<Region>*>(held); })
          .options(at::TensorOptions().dtype(type))
          .make_tensor();
  TORCH_CHECK_VALUE(made.numel() == 0 || made.is_non_overlapping_and_dense(),
                    "expected dense elements that do not overlap, got sizes ", sizes,
                    " and strides ", strides);
  return made;
}

void share_version(const at::Tensor& tensor, const at::Tensor& owner) {
  TORCH_CHECK_VALUE(!tensor.is_inference() && !owner.is_inference(),
                    "tensors made in inference mode have no version to share");
  tensor.unsafeGetTensorImpl()->set_version_counter(owner.unsafeGetTensorImpl()->version_counter());
}

}  // namespace dreamcomm

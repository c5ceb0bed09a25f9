#include "c10d/region/region_tensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

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

/// Deletes what keeps a tensor's region alive. Its address tells such tensors from others.
void release_region(void* held) { delete static_cast<std::shared_ptr<Region>*>(held); }

/// A part of a region.
struct RegionPart {
  std::shared_ptr<Region> region;
  std::size_t begin;
  std::size_t end;
};

/// The bytes from a tensor's first element to its last one.
RegionPart part_of(const at::Tensor& tensor, std::shared_ptr<Region> region) {
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  std::size_t span = 1;
  for (std::int64_t i = 0; i < tensor.dim(); ++i)
    span += static_cast<std::size_t>((tensor.size(i) - 1) * tensor.stride(i));
  const std::byte* const whole = region->whole();
  const bool is_of_whole = data >= whole && data < whole + region->bytes();
  const auto begin = static_cast<std::size_t>(data - (is_of_whole ? whole : region->data()));
  return {std::move(region), begin, begin + span * tensor.element_size()};
}

/// Where tensors lie in files, in order, neighbours together.
std::vector<RegionPart> parts_in_files(const std::vector<at::Tensor>& tensors) {
  constexpr std::size_t kGap = 4096;
  std::vector<RegionPart> parts;
  for (const at::Tensor& one : tensors) {
    std::shared_ptr<Region> region = region_of(one);
    if (region == nullptr || region->folder() == nullptr || one.numel() == 0) continue;
    parts.push_back(part_of(one, std::move(region)));
  }
  std::sort(parts.begin(), parts.end(), [](const RegionPart& a, const RegionPart& b) {
    return std::tie(a.region, a.begin) < std::tie(b.region, b.begin);
  });
  std::vector<RegionPart> joined;
  for (RegionPart& one : parts) {
    const bool follows = !joined.empty() && joined.back().region == one.region &&
                         one.begin <= joined.back().end + kGap;
    if (follows)
      joined.back().end = std::max(joined.back().end, one.end);
    else
      joined.push_back(std::move(one));
  }
  return joined;
}

}  // namespace

std::shared_ptr<Region> region_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (data.get_deleter() != &release_region) return nullptr;
  return *static_cast<std::shared_ptr<Region>*>(data.get_context());
}

void write_files(const std::vector<at::Tensor>& tensors) {
  for (const RegionPart& one : parts_in_files(tensors))
    one.region->start_writing(one.begin, one.end - one.begin);
}

void drop_files(const std::vector<at::Tensor>& tensors) {
  for (const RegionPart& one : parts_in_files(tensors))
    one.region->drop(one.begin, one.end - one.begin);
}

void read_files(const std::vector<at::Tensor>& tensors) {
  for (const RegionPart& one : parts_in_files(tensors))
    one.region->start_reading(one.begin, one.end - one.begin);
}

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
  at::Tensor made = at::for_blob(data, sizes)
                        .strides(strides)
                        .context(owner, &release_region)
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

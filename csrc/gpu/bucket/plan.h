// Divides a bucket's tensors among kernels.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "gpu/bucket/bucket.h"
#include "kernels/bucket.h"

namespace dreamcomm::gpu {

/// Tensors that fit into a kernel's parameters. There are two sizes, because each launch copies all
/// parameters.
inline constexpr int kFewParts = 240;
inline constexpr int kManyParts = 2000;

/// The row of a buffer that one kernel serves, and its tensors.
struct BucketRow {
  BucketTask task;
  std::vector<Part> parts;
};

/// A buffer and its tensors as a whole; `item` and `flat_item` are the bytes of an element
/// of the tensors and of the buffer.
struct Bucket {
  BucketTask task;  // parts not set
  std::vector<Part> parts;
  std::size_t item = 0;
  std::size_t flat_item = 0;
};

/// One row, if there are few enough tensors. Otherwise several rows, which begin at whole blocks of
/// the sum of squares, so that a tensor may be in two of them. None for a buffer without elements.
inline std::vector<BucketRow> rows_of(const Bucket& bucket) {
  constexpr std::size_t kBlock = kernels::Inspector::kBlock;
  constexpr std::size_t kMost = kManyParts;
  static_assert(kMost > kBlock, "a row of that many tensors has at least a block of elements");
  const std::vector<Part>& parts = bucket.parts;
  std::vector<BucketRow> rows;
  std::size_t first = 0;
  for (std::size_t begin = 0; begin < bucket.task.count;) {
    const std::size_t last = first + kMost < parts.size() ? first + kMost : parts.size();
    const std::size_t end =
        last < parts.size() ? parts[last].begin / kBlock * kBlock : bucket.task.count;
    BucketRow row{bucket.task, {}};
    for (; first < parts.size() && parts[first].begin < end; ++first) {
      const std::size_t skipped = begin > parts[first].begin ? begin - parts[first].begin : 0;
      row.parts.push_back(
          {parts[first].data + skipped * bucket.item, parts[first].begin + skipped - begin});
    }
    row.task.flat += begin * bucket.flat_item;
    if (row.task.residual != nullptr) row.task.residual += begin;
    if (row.task.partials != nullptr) row.task.partials += begin / kBlock;
    row.task.count = end - begin;
    row.task.parts = static_cast<int>(row.parts.size());
    rows.push_back(std::move(row));
    begin = end;
    // The last tensor may continue in the next row.
    if (first < parts.size() && parts[first].begin > end) --first;
  }
  return rows;
}

/// The parts of a PackJob or UnpackJob, without the tensors that have no elements.
template <typename Tensor>
std::vector<Part> parts_of(std::span<const Tensor> tensors) {
  std::vector<Part> parts;
  std::uint64_t begin = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.count > 0) parts.push_back({const_cast<std::byte*>(tensor.data), begin});
    begin += tensor.count;
  }
  return parts;
}

template <typename Tensor>
std::size_t count_of(std::span<const Tensor> tensors) {
  std::size_t sum = 0;
  for (const Tensor& tensor : tensors) sum += tensor.count;
  return sum;
}

inline Bucket bucket_of(const PackJob& job) {
  return {.task = {.flat = job.out,
                   .residual = job.residual,
                   .count = count_of(job.tensors),
                   .scale = job.scale},
          .parts = parts_of(job.tensors),
          .item = item_size(job.from),
          .flat_item = item_size(job.to)};
}

/// `partials`: partials_of() of the elements (launch.h), or null.
inline Bucket bucket_of(const UnpackJob& job, double* partials) {
  return {.task = {.flat = const_cast<std::byte*>(job.in),
                   .partials = partials,
                   .count = count_of(job.tensors),
                   .scale = job.factor,
                   .divisor = static_cast<double>(job.divisor)},
          .parts = parts_of(job.tensors),
          .item = item_size(job.to),
          .flat_item = item_size(job.from)};
}

/// The bytes that have to be moved: each tensor, buffer and residual once.
inline Moved moved_by(const PackJob& job) {
  const std::size_t count = count_of(job.tensors);
  const std::size_t carried = job.residual == nullptr ? 0 : sizeof(float);
  return {count * (item_size(job.from) + carried), count * (item_size(job.to) + carried)};
}

inline Moved moved_by(const UnpackJob& job) {
  const std::size_t count = count_of(job.tensors);
  return {count * item_size(job.from), count * item_size(job.to)};
}

}  // namespace dreamcomm::gpu

#include "c10d/backward/heap_placement.h"

#include <algorithm>
#include <utility>

#include "c10d/backward/wanted_tensors.h"
#include "c10d/base/pages.h"
#include "c10d/process/process_heap.h"

namespace dreamcomm {
namespace {

/// For each gradient that is reduced where it is.
std::shared_ptr<WantedTensors> wanted_of(const BucketSet& set) {
  std::map<std::size_t, int> wanted;
  for (const Parameter& one : set.parameters) {
    const std::size_t bytes = one.gradient_bytes();
    if (!one.is_sparse() && set.rule.is_own(bytes)) ++wanted[bytes];
  }
  std::shared_ptr<Heap> heap = live_process_heap();
  if (wanted.empty() || !heap) return nullptr;
  // Other tensors of a pass may have the size of a gradient.
  for (auto& [bytes, count] : wanted) count = 2 * count + 2;
  return std::make_shared<WantedTensors>(std::move(heap), wanted);
}

}  // namespace

HeapPlacement::~HeapPlacement() {
  if (early_) place_new_tensors(nullptr);
}

void HeapPlacement::begin(const BucketSet& set) {
  if (std::exchange(planned_for_, set.changes) != set.changes) {
    wanted_ = wanted_of(set);
    if (!set.rule.is_sharded()) early_ = nullptr;
  }
  place_new_tensors(wanted_);
}

void HeapPlacement::end() { place_new_tensors(early_); }

void HeapPlacement::note_early(const BucketSet& set, const Parameter& parameter) {
  const at::Tensor& now = parameter.tensor.grad();
  const std::size_t bytes = parameter.gradient_bytes();
  if (!wanted_ || parameter.made != 1 || !set.rule.is_own(bytes) || parameter.is_sparse()) return;
  const std::shared_ptr<Heap> heap = live_process_heap();
  if (!heap || is_in_heap(now)) return;
  const auto same_size = [bytes](const Parameter& one) { return one.gradient_bytes() == bytes; };
  int& wanted = early_sizes_[bytes];
  if (wanted >= 2 * std::count_if(set.parameters.begin(), set.parameters.end(), same_size)) return;
  ++wanted;
  early_ = std::make_shared<WantedTensors>(heap, early_sizes_);
}

void HeapPlacement::trim() {
  if (early_sizes_.empty() || trimmed_) return;
  give_back_free_pages();
  trimmed_ = true;
}

}  // namespace dreamcomm

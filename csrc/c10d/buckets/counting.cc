#include "c10d/buckets/counting.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <span>
#include <utility>

#include "core/error.h"

namespace dreamcomm {
namespace {

double number(const Count& count) {
  return count.is_whole ? static_cast<double>(count.whole) : count.weight;
}

double sum_in_order(const std::vector<Count>& counts) {
  double sum = 0;
  for (const Count& one : counts) sum += number(one);
  return sum;
}

/// As a rank adds the gradients of its shards.
double sum_along_tree(const std::vector<Count>& counts) {
  std::vector<double> sums;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    double sum = number(counts[i]);
    for (std::size_t rest = i; (rest & 1U) != 0; rest >>= 1U) {
      sum = sums.back() + sum;
      sums.pop_back();
    }
    sums.push_back(sum);
  }
  double sum = 0;
  for (; !sums.empty(); sums.pop_back()) sum = sums.back() + sum;
  return sum;
}

}  // namespace

void Counting::add(const Count& count) {
  twice_ = twice_ || pending_.has_value();
  pending_ = count;
}

void Counting::forget() {
  passes_.clear();
  fault_.reset();
  taken_ = has_gradients_ = false;
}

void Counting::begin_pass(bool uncleared) {
  uncleared = std::exchange(kept_, false) || uncleared;
  const bool was_taken = taken_;
  if (was_taken || (has_gradients_ && !uncleared)) forget();
  if (was_taken && uncleared) {
    fault_ = CountFault::kReduced;
  } else if (!fault_ && (twice_ || !pending_)) {
    fault_ = twice_ ? CountFault::kTwice : CountFault::kMissing;
  }
  passes_.push_back(pending_.value_or(Count{}));
  pending_.reset();
  twice_ = false;
}

void Counting::replace(const Count& count) {
  forget_all();
  passes_ = {count};
}

RankCount Counting::take() {
  taken_ = true;
  if (fault_) return RankCount::of_fault(*fault_);
  const bool all_whole =
      std::all_of(passes_.begin(), passes_.end(), [](const Count& one) { return one.is_whole; });
  if (!all_whole) {
    return RankCount::of_weight(along_tree_ ? sum_along_tree(passes_) : sum_in_order(passes_));
  }
  std::int64_t sum = 0;
  for (const Count& one : passes_) sum = std::min(RankCount::kMost - one.whole, sum) + one.whole;
  return RankCount::of_whole(sum);
}

std::shared_ptr<GradientCounts> Counting::begin_reduction(const GroupPtr& group, c10::Device device,
                                                          RankCount own, bool rides) {
  counts_ = std::make_shared<GradientCounts>(own, along_tree_);
  work_ = nullptr;
  if (rides) return counts_;
  const auto ranks = static_cast<std::int64_t>(group->getSize());
  all_ = at::empty({ranks}, at::TensorOptions().dtype(at::kLong).device(device));
  const at::Tensor mine = at::empty({1}, all_.options());
  mine.fill_(static_cast<std::int64_t>(own.bits()));
  work_ = all_gather_into(group, all_.split(1), mine);
  if (!device.is_cpu()) return counts_;
  // Later calls of the same group read them there.
  const auto* const data = static_cast<const std::uint64_t*>(all_.const_data_ptr());
  counts_->expect_at({data, static_cast<std::size_t>(ranks)});
  return counts_;
}

void Counting::await() {
  if (!work_) return;
  std::exchange(work_, nullptr)->wait();
  if (!all_.is_cpu()) {
    const at::Tensor all = all_.cpu();
    const auto* const data = static_cast<const std::uint64_t*>(all.const_data_ptr());
    counts_->take({data, static_cast<std::size_t>(all.numel())});
  }
  try {
    counts_->require();
  } catch (const Error& error) {
    TORCH_CHECK(false, error.what());
  }
}

}  // namespace dreamcomm

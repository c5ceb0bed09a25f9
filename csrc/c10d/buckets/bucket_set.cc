#include "c10d/buckets/bucket_set.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"

namespace dreamcomm {
namespace {

std::string named(const c10d::ProcessGroup& group) {
  return concat("rank ", group.getRank(), " of ", group.getSize());
}

void require_one_factor(const std::string& who, const Parameters& parameters,
                        const std::vector<std::vector<std::size_t>>& buckets) {
  for (const std::vector<std::size_t>& members : buckets) {
    const Parameter& first = parameters[members.front()];
    for (const std::size_t member : members) {
      const Parameter& one = parameters[member];
      TORCH_CHECK_VALUE(one.factor == first.factor, who, ": parameters '", first.name, "' and '",
                        one.name, "' are in one bucket and have gradients of different factors, ",
                        first.factor, " and ", one.factor, ": plan a bucket for each factor");
    }
  }
}

}  // namespace

BucketSet::BucketSet(Parameters parameters_, Rule rule_)
    : parameters(std::move(parameters_)), rule(std::move(rule_)), who(named(*rule.group)) {}

void BucketSet::set_buckets(const std::vector<std::vector<std::size_t>>& members) {
  const Lock lock(mutex);
  require_one_factor(who, parameters, members);
  buckets.clear();
  buckets.reserve(members.size());
  for (const std::vector<std::size_t>& numbers : members) {
    for (const std::size_t number : numbers) parameters[number].bucket = buckets.size();
    buckets.emplace_back(numbers, parameters);
  }
  ++changes;
  lay_out_in_heaps();
}

void BucketSet::set_factors(const std::vector<double>& factors) {
  const Lock lock(mutex);
  TORCH_CHECK_VALUE(factors.size() == parameters.size(), who, ": expected factors of ",
                    parameters.size(), " parameters, got ", factors.size());
  TORCH_CHECK_VALUE(pass.expired(), who, ": factors cannot be set within a backward pass");
  for (const double factor : factors)
    TORCH_CHECK_VALUE(std::isfinite(factor), who, ": expected finite factors, got ", factor);
  std::vector<double> before;
  std::vector<std::vector<std::size_t>> members;
  for (std::size_t i = 0; i < factors.size(); ++i)
    before.push_back(std::exchange(parameters[i].factor, factors[i]));
  for (const Bucket& bucket : buckets) members.push_back(bucket.members());
  try {
    set_buckets(members);
  } catch (...) {
    for (std::size_t i = 0; i < factors.size(); ++i) parameters[i].factor = before[i];
    throw;
  }
}

void BucketSet::set_group(const GroupPtr& group, bool averages, std::size_t own_bytes) {
  const Lock lock(mutex);
  rule.group = group;
  rule.averages = averages;
  rule.own_bytes = own_bytes;
  who = named(*group);
  ++changes;
}

void BucketSet::set_hook(std::shared_ptr<c10d::CommHookInterface> hook, bool in_turn) {
  const Lock lock(mutex);
  rule.hook = std::move(hook);
  rule.hook_in_turn = in_turn;
  ++changes;
}

void BucketSet::lay_out_in_heaps() {
  if (!rule.heaps) return;
  for (Bucket& bucket : buckets) bucket.lay_out(parameters, rule);
}

void BucketSet::touch_rest() {
  for (Parameter& one : parameters) {
    const at::Tensor& now = one.tensor.grad();
    if (rule.is_sharded()) {
      const bool is_old = !rule.row.is_deferred() && one.is_as_reduced();
      one.touched = one.is_local() && !is_old;
      if (one.touched) one.require_layout(who, /*is_sharded=*/true);
      continue;
    }
    // Later writes to a reduced gradient are as right in the average of all.
    const bool is_average = rule.factor_or(one.factor) == 0 && !rule.counted;
    const bool is_old = is_average ? one.is_as_reduced() : one.is_reduced();
    one.touched = now.defined() && (one.touched || !is_old);
    one.before.set(now);  // outside of a pass the script has made it what it is
    one.require_layout(who, /*is_sharded=*/false);
  }
}

void BucketSet::set_counted(const GroupPtr& over) {
  const Lock lock(mutex);
  rule.counted = over == nullptr;
  counted_over = over;
  counting.emplace(/*along_tree=*/rule.shards > 0);
}

void BucketSet::set_shards(int shards, std::size_t per_rank) {
  const Lock lock(mutex);
  rule.shards = shards;
  shard_sums.emplace(per_rank, parameters.size());
  for (Parameter& one : parameters) {
    const at::ScalarType type = one.tensor.scalar_type();
    one.widens = type == at::kHalf || type == at::kBFloat16;
  }
}

void BucketSet::begin_counts(std::optional<RankCount> own) {
  if (!counting || !finishes) return;
  const GroupPtr& group = counted_over ? counted_over : rule.group;
  const DreamBackend* const backend = own_backend(*rule.group, device().type());
  const bool rides = calls_count() && backend != nullptr && backend->is_on_one_host();
  rule.counts = counting->begin_reduction(group, exchange_device(*group, device()),
                                          own ? *own : counting->take(), rides);
}

void BucketSet::adopt_counting(BucketSet& other) {
  const std::scoped_lock both(mutex, other.mutex);
  if (counting && other.counting) counting = std::move(*other.counting);
}

void BucketSet::await_counts() {
  if (counting && !calls_count()) counting->await();
}

double BucketSet::divisor() const {
  const Lock lock(mutex);
  TORCH_CHECK(rule.counts, who, ": no counts were exchanged");
  return rule.counts->divisor();
}

bool BucketSet::calls_count() const {
  return rule.averages && rule.counted && device().is_cpu() &&
         std::none_of(parameters.begin(), parameters.end(),
                      [](const Parameter& one) { return one.is_sparse(); });
}

std::vector<at::Tensor> BucketSet::mixed() const {
  const Lock lock(mutex);
  std::vector<at::Tensor> found;
  for (const Parameter& one : parameters) {
    const bool is_mixed = one.mix == Parameter::Mix::kMixed && one.is_reduced();
    if (is_mixed && !is_zero(one.grad())) found.push_back(one.tensor);
  }
  return found;
}

}  // namespace dreamcomm

#include "c10d/buckets/bucket_set.h"

#include <utility>

#include "core/error.h"

namespace dreamcomm {
namespace {

std::string named(const c10d::ProcessGroup& group) {
  return concat("rank ", group.getRank(), " of ", group.getSize());
}

}  // namespace

BucketSet::BucketSet(Parameters parameters_, Rule rule_)
    : parameters(std::move(parameters_)), rule(std::move(rule_)), who(named(*rule.group)) {}

void BucketSet::set_buckets(const std::vector<std::vector<std::size_t>>& members) {
  const Lock lock(mutex);
  buckets.clear();
  buckets.reserve(members.size());
  for (const std::vector<std::size_t>& numbers : members) {
    for (const std::size_t number : numbers) parameters[number].bucket = buckets.size();
    buckets.emplace_back(numbers, parameters);
  }
  ++changes;
  lay_out_in_heaps();
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
    const bool is_old = rule.factor == 0 ? one.is_as_reduced() : one.is_reduced();
    one.touched = now.defined() && (one.touched || !is_old);
    one.before.set(now);  // outside of a pass the script has made it what it is
    one.require_layout(who, /*is_sharded=*/false);
  }
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

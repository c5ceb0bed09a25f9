#include "c10d/backward/order.h"

#include <algorithm>

namespace dreamcomm {

void GradientOrder::learn(BucketSet& set) {
  const auto orders = orders_of_all(set.rule.group, set.device(), made_, set.parameters.size());
  if (std::all_of(orders.begin(), orders.end(), [](const auto& one) { return one.empty(); }))
    return;
  set.set_buckets(replan_(orders));
  learned_ = true;
}

void GradientOrder::count(BucketSet& set) {
  counted_ = made_.size();
  if (!is_counted()) return;
  for (Parameter& one : set.parameters) one.expected = one.made;
}

void GradientOrder::forget(BucketSet& set) {
  learned_ = false;
  counted_ = 0;
  for (Parameter& one : set.parameters) one.expected = 0;
}

}  // namespace dreamcomm

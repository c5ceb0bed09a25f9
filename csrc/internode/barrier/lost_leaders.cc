// What a leader in a monitored barrier between hosts knows of leaders that do not post: whom it
// waits for, and who has gone.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <map>
#include <string>

#include "core/error.h"
#include "internode/barrier/monitored_barrier.h"

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kGlancesApart{100};
constexpr milliseconds kPosts{300};  // for what one that has gone has posted before
constexpr milliseconds kWords{300};  // for its host's ranks to notice, and to tell of it

}  // namespace

/// Whether this rank cannot do without that leader: it has not said that it leaves this roll call,
/// or how it ended.
bool InternodeBarrier::needs(int leader) const {
  if (!judges()) return read_.ended <= number_;
  return !has_left(reports_.at(static_cast<std::size_t>(topology_.host_of(leader)) - 1));
}

/// With what their connections say of it.
std::map<int, std::string> InternodeBarrier::newly_gone() {
  std::map<int, std::string> found;
  const std::size_t others = judges() ? reports_.size() : 1;
  for (std::size_t i = 0; i < others; ++i) {
    const int one = judges() ? leader(i) : 0;
    if (gone_.contains(one) || !needs(one)) continue;
    try {
      means_.monitor.glance(one);
    } catch (const Error& error) {
      found.emplace(one, error.what());
    }
  }
  return found;
}

void InternodeBarrier::look_for_gone() {
  if (Clock::now() < next_glance_) return;
  const std::map<int, std::string> found = newly_gone();
  if (!found.empty()) look(kPosts);
  const Clock::time_point until = Clock::now() + kWords;
  for (const auto& [one, connection] : found) {
    if (!needs(one)) continue;
    const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
    const std::string told = means_.causes.told_by(one, std::max(left, milliseconds(0)));
    gone_[one] = concat(place(one), ": ", told.empty() ? connection : told);
    // Where all are named each stands for itself.
    if (told.empty() && !(judges() && terms_.all)) gone_[one] += means_.causes.others(one);
  }
  next_glance_ = Clock::now() + kGlancesApart;
}

/// Rank 0 waits for all leaders, the others for what it says.
std::string InternodeBarrier::awaited() {
  const std::scoped_lock lock(mutex_);
  if (!judges()) {
    return concat(place(0), read_.in == number_ + 1 ? ", which waits for others" : "");
  }
  for (std::size_t i = 0; i < reports_.size(); ++i) {
    if (!is_in(reports_[i])) return place(leader(i));
  }
  for (std::size_t i = 0; i < reports_.size(); ++i) {
    if (!reports_[i].has_count()) return concat(place(leader(i)), ", which waits for others there");
  }
  return "the other hosts";
}

}  // namespace dreamcomm

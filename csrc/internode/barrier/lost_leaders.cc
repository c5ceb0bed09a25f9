// How a leader in a monitored barrier between hosts finds lost leaders, and which leaders it waits
// for.
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

constexpr milliseconds kCheckInterval{100};
constexpr milliseconds kPosts{300};    // for the posts of a lost leader
constexpr milliseconds kReports{300};  // for its host's ranks to notice and report it

}  // namespace

/// True if this rank still needs that leader: it has not posted that it has left this barrier, or
/// how the barrier ended.
bool InternodeBarrier::needs(int leader) const {
  if (!decides()) return read_.ended <= number_;
  return !has_left(reports_.at(static_cast<std::size_t>(topology_.host_of(leader)) - 1));
}

/// Returns leaders that are newly lost, with the errors of their connections.
std::map<int, std::string> InternodeBarrier::newly_lost() {
  std::map<int, std::string> found;
  const std::size_t others = decides() ? reports_.size() : 1;
  for (std::size_t i = 0; i < others; ++i) {
    const int one = decides() ? leader(i) : 0;
    if (gone_.contains(one) || !needs(one)) continue;
    try {
      means_.monitor.check_alive(one);
    } catch (const Error& error) {
      found.emplace(one, error.what());
    }
  }
  return found;
}

void InternodeBarrier::look_for_lost() {
  if (Clock::now() < next_check_) return;
  const std::map<int, std::string> found = newly_lost();
  if (!found.empty()) look(kPosts);
  const Clock::time_point until = Clock::now() + kReports;
  for (const auto& [one, connection] : found) {
    if (!needs(one)) continue;
    const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
    const std::string told = means_.causes.told_by(one, std::max(left, milliseconds(0)));
    gone_[one] = concat(place(one), ": ", told.empty() ? connection : told);
    // If all are named, each entry contains only its own reason.
    if (told.empty() && !(decides() && terms_.all)) gone_[one] += means_.causes.others(one);
  }
  next_check_ = Clock::now() + kCheckInterval;
}

/// Rank 0 waits for all leaders, the others for its verdict.
std::string InternodeBarrier::awaited() {
  const std::scoped_lock lock(mutex_);
  if (!decides()) {
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

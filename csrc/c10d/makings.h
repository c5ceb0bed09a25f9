// Which groups the ranks of a job make: in one order on all of them, or not.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "c10d/store_clerk.h"

namespace dreamcomm {

/// A group that a rank makes. Ranks count the groups of their job, and torch names these by that.
struct Making {
  std::int64_t number = 0;
  std::vector<int> members{};  // as ranks of the job
  bool failed = false;
};

/// Ranks that make groups in different orders wait for ranks that do not come. So a rank whose
/// wait has lasted a while posts what it makes, and looks at what the awaited one has posted.
///
/// INVARIANT: a rank's numbers grow, and all ranks count alike if they make groups in one order.
/// So a rank that makes a later group, or one of this number with other members, or an earlier one
/// that this rank is in and has never made, will not come; nor will one that has failed to make
/// this very group. What was posted long ago only has a smaller number, of a group that both made.
class Makings {
 public:
  /// `clerk` is of a store of this job's default group alone, of which this is rank `rank`.
  Makings(int rank, std::shared_ptr<StoreClerk> clerk);

  /// From now on, until end(). One at a time.
  void begin(Making making);
  /// What was begun has been made, or not: that stays posted until the next one begins, for those
  /// that wait for this rank elsewhere.
  void end(bool made);
  /// Why another rank of the job does not come to what this one makes, or "". Bounded.
  std::string contradiction(int other);

 private:
  void post();
  std::string judge(int other, const Making& theirs) const;

  const int rank_;
  const std::shared_ptr<StoreClerk> clerk_;
  std::mutex mutex_;
  std::optional<Making> current_;
  std::set<std::int64_t> begun_;  // numbers
  bool posted_ = false;
};

}  // namespace dreamcomm

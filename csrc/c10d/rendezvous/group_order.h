// Which groups the ranks of a job make: in one order on all of them, or not.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c10d/rendezvous/store_worker.h"

namespace dreamcomm {

/// What ranks can do that make groups of their own, without the rest of the job.
inline constexpr const char* kMembersAlone =
    "All ranks of the job make all groups in one order; ranks that make a group without the rest "
    "give new_group use_local_synchronization=True";

/// A group that a rank makes.
struct GroupRecord {
  std::string name{};
  std::vector<int> members{};  // as ranks of the job
  int turn = 1;                // how many groups of this name the rank has made, with this one
  bool failed = false;
  bool contradicted = false;  // it has failed, or is about to, as another rank makes something else

  /// All ranks of a job make this group: they count these, and torch names each by that.
  std::optional<std::int64_t> number() const;
  /// The members alone make it (use_local_synchronization): torch names it by a hash of them and
  /// of how many groups the rank is in.
  bool is_hashed() const;
};

/// Ranks that make groups in different orders wait for ranks that do not come. So a rank whose
/// wait has lasted a while posts what it makes, and looks at what the awaited one has posted.
///
/// INVARIANT, of two groups with numbers: a rank's numbers grow, and all ranks count alike if they
/// make groups in one order. So a rank that makes a later group, or one of this number with other
/// members, or an earlier one that this rank is in and has never made, will not come; nor will one
/// that has failed to make this very group. What was posted long ago only has a smaller number, of
/// a group that both made.
///
/// INVARIANT, of two groups of which one has a hashed name: a rank makes one group at a time, and
/// is through with one when all members have come to it. So a rank that makes another group for the
/// nth time, of which this rank is a member that has not begun it n times, waits for this rank
/// there, while this rank waits for it here: neither will come. What was posted long ago is of a
/// group that this rank has begun as often. A rank that has gone on from this very group had come
/// to it: that is in the store, and a waiting rank looks there once more
/// (transport/bootstrap/setup_board.cc). A rank that has failed elsewhere may yet come. One that
/// failed by such a contradiction does not: the ranks that wait for it get the same error.
class GroupOrder {
 public:
  /// `clerk` is of a store of this job's default group alone, of which this is rank `rank`.
  GroupOrder(int rank, std::shared_ptr<StoreWorker> worker);

  /// From now on, until end(). One at a time. Its turn is counted here.
  void begin(GroupRecord record);
  /// What was begun has been made, or not: that stays posted until the next one begins, for those
  /// that wait for this rank elsewhere.
  void end(bool made);
  /// Why another rank of the job does not come to what this one makes, or "". Bounded.
  std::string contradiction(int other);

 private:
  void post();
  bool has_begun(const GroupRecord& theirs) const;
  /// Why a rank that has posted `theirs` does not come, or "".
  std::string judge(int other, const GroupRecord& theirs) const;
  std::string judge_numbers(int other, const GroupRecord& theirs) const;
  std::string judge_names(int other, const GroupRecord& theirs) const;

  const int rank_;
  const std::shared_ptr<StoreWorker> worker_;
  std::mutex mutex_;
  std::optional<GroupRecord> current_;
  std::map<std::string, int> begun_;  // how often, by name
  bool posted_ = false;
};

}  // namespace dreamcomm

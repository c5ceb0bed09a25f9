// Detects ranks that create process groups in different orders.
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

/// The advice for ranks that make a group without the rest of the job.
inline constexpr const char* kMembersAlone =
    "All ranks of the job make all groups in one order; ranks that make a group without the rest "
    "give new_group use_local_synchronization=True";

/// A group that a rank makes.
struct GroupRecord {
  std::string name{};
  std::vector<int> members{};  // as ranks of the job
  int turn = 1;                // how many groups of this name the rank has made, with this one
  bool failed = false;
  bool contradicted = false;  // it has failed, or is about to, as another rank makes another group

  /// All ranks of a job make this group: they count these, and torch names each by that.
  std::optional<std::int64_t> number() const;
  /// The members alone make it (use_local_synchronization): torch names it by a hash of them and
  /// of how many groups the rank is in.
  bool is_hashed() const;
};

/// Ranks that make groups in different orders wait for ranks that wait elsewhere. So a rank whose
/// wait has lasted a while posts the group it makes, and reads what the awaited one has posted.
///
/// INVARIANT for two groups with numbers: a rank's numbers grow, and all ranks count alike if they
/// make groups in one order. So a rank will not take part in this group if it makes a later one, or
/// another of this number with other members, or an earlier group that this rank is in and has
/// never made, or if it failed to make this very group. An old post has a smaller number, of a
/// group that both made.
///
/// INVARIANT for two groups of which one has a hashed name: a rank makes one group at a time, and
/// ends it when all members take part. So let a rank make another group for the nth time, and let
/// this rank be a member that has not begun it n times: then that rank waits for this one there,
/// and this one waits for it here, both in vain. An old post is of a group that this rank has begun
/// as often. A rank that has finished this very group had taken part: that is in the store, and a
/// waiting rank looks there once more (transport/bootstrap/setup_board.cc). A rank that failed
/// elsewhere may still take part. One that failed by such a contradiction does not: the ranks that
/// wait for it get the same error.
class GroupOrder {
 public:
  /// `worker` uses a store of this job's default group alone, in which this is rank `rank`.
  GroupOrder(int rank, std::shared_ptr<StoreWorker> worker);

  /// From now on, until end(). One at a time. Its turn is counted here.
  void begin(GroupRecord record);
  /// The group was made, or not. That stays posted until the next one begins, for ranks that wait
  /// for this one elsewhere.
  void end(bool made);
  /// Why another rank of the job does not take part in the group this one makes, or "". Bounded.
  std::string contradiction(int other);

 private:
  void post();
  bool has_begun(const GroupRecord& theirs) const;
  /// Why a rank that has posted `theirs` does not take part, or "".
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

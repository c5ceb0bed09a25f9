// Gathers the parameters of a unit, of which each rank has its rows, into one block of memory.
//
//   block:  | a: rows of 0 | rows of 1 | ... | b: rows of 0 | rows of 1 | ... |
//
// A large parameter is gathered straight into its place, by a collective of its own: each rank
// gives as many bytes as the first, whose rows are never fewer, and the block has room for them.
// Small ones go together, in one collective, with the unit's number in front. So ranks that gather
// different units notice it before they use what they got. A group may have a part of all owners of
// rows: then the others' places stay as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "c10d/buckets/moves/group_calls.h"

namespace dreamcomm {

/// Where a parameter lies in a unit's block, in bytes.
struct GatheredPlace {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;  // of the whole parameter
  std::int64_t each = 0;   // of the first owner's rows
  bool direct = false;     // by a collective of its own
};

class UnitGather {
 public:
  /// `number`: of the unit, from 0 on. `owners`: which rows each rank of the group has, by the
  /// order of owners.
  UnitGather(GroupPtr group, std::int64_t number, std::vector<GatheredPlace> places,
             std::vector<std::int64_t> owners);

  /// Begins to fill the block with all ranks' rows. `rows`: this rank's, one tensor for each place.
  /// `note`: a number for the other ranks.
  void start(const at::Tensor& block, const std::vector<at::Tensor>& rows, std::int64_t note);
  /// Waits until the block is filled. Gives the number of the unit that each rank has gathered; if
  /// they differ, the block has nothing.
  std::vector<std::int64_t> wait();
  /// The notes of all ranks at the last gather that has ended.
  const std::vector<std::int64_t>& notes() const { return notes_; }
  bool is_under_way() const { return small_ != nullptr; }
  /// After an error: waits for what is under way, and keeps nothing of it.
  void drop();
  /// Bytes that this rank has received in all.
  std::uint64_t received() const { return received_; }

 private:
  WorkPtr gather(TensorList to, const at::Tensor& from);
  TensorList places_in(const at::Tensor& block, const GatheredPlace& place) const;
  void pack(const std::vector<at::Tensor>& rows, std::int64_t note);
  void unpack();
  void end();

  const GroupPtr group_;
  const std::int64_t number_;
  const std::vector<GatheredPlace> places_;
  const std::vector<std::int64_t> owners_;
  at::Tensor packed_;           // the number, and this rank's small rows
  at::Tensor received_packed_;  // of all ranks
  at::Tensor block_;            // under way
  WorkPtr small_;
  std::vector<WorkPtr> large_;
  std::vector<std::int64_t> notes_;
  std::uint64_t received_ = 0;
};

}  // namespace dreamcomm

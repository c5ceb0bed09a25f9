// A bucket: gradients that one collective reduces. Large ones are reduced where they are, in the
// heap; small ones, and all of a communication hook's, in one flat tensor, whose memory they then
// have.
//
// INVARIANT: a pass writes to the flat tensor's memory only where the members' gradients lie that
// it reduces. Gradients of earlier passes that somebody has kept stay as they are, as the flat
// tensor gets other memory when it has more users than itself and gradients (renew_if_kept).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "c10d/backend/backend.h"
#include "c10d/gradients/gradient.h"
#include "c10d/gradients/sharded_reduction.h"

namespace dreamcomm {

using Gradients = std::vector<Gradient>;

/// How buckets are reduced.
struct BucketRule {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  /// Gradients of so many bytes and more are reduced where they are; 0: none is.
  std::size_t own_bytes = 0;
  /// Whether the group averages itself: the sum of all ranks is divided once, and rounded once.
  bool averages = false;
  /// The gradient is `factor` times the ranks' sum; 0: their average.
  double factor = 0;
  /// Whether ranks tell each other after a pass which gradients they have. Else each has to have
  /// all.
  bool finds_unused = true;
  /// Whether each rank keeps its rows of the averages alone.
  bool sharded = false;
  /// Backward passes do not reduce sharded gradients, and a reduction leaves `grad` as it is.
  bool deferred = false;
  /// The backend whose ranks map each other's heaps; null: shards go through collectives.
  c10::intrusive_ptr<DreamBackend> heaps;
  /// In a join, how many ranks the average is of; 0: all.
  std::int64_t divisor = 0;
  std::shared_ptr<c10d::CommHookInterface> hook;
  /// Whether the hook may call several collectives, one after the other. Then a bucket's hook
  /// starts after the one before has ended: else ranks would call them in different orders.
  bool hook_in_turn = false;
};

class GradientBucket {
 public:
  /// `members` index `gradients`: of one type and device, or one sparse gradient alone.
  GradientBucket(std::vector<std::size_t> members, const Gradients& gradients);

  const std::vector<std::size_t>& members() const { return members_; }
  std::size_t pending = 0;  // members that this pass still awaits

  /// Starts the collective of the members' gradients. A gradient that is not touched here takes
  /// part as it is, by a copy, or as zeros; with `zeros` all do.
  void launch(Gradients& gradients, const BucketRule& rule, std::size_t index, std::size_t count,
              bool zeros = false);
  /// Waits for what the hook has started, which may call collectives of its own.
  void await_hook() const {
    if (future_) future_->wait();
  }
  bool hook_ended() const { return !future_ || future_->completed(); }
  /// Waits for the collective. Gradients that are not `touched` by any rank stay as they are.
  void settle(Gradients& gradients, const BucketRule& rule, const std::vector<bool>& touched);
  /// Makes the flat tensor, unless it is there. Otherwise launch() does.
  void lay_out(const Gradients& gradients, const BucketRule& rule);
  /// Waits for a sharded bucket's collective, and frees what it has read.
  void complete_sharded(Gradients& gradients, const BucketRule& rule);
  /// Brings this rank's gradients into its heap, where they then are `grad`. Returns one tensor for
  /// each member, in the order of memory; undefined: there is none.
  std::vector<at::Tensor> place(Gradients& gradients, const BucketRule& rule);
  /// Which members any rank has, after settle() in the ranks' heaps.
  const std::vector<bool>& touched() const { return touched_; }
  /// After an error: waits for what is under way, and keeps nothing of it.
  void drop();
  /// The bytes that a rank reduces in it.
  std::uint64_t bytes() const { return bytes_; }
  /// The part of them that was copied first in the latest pass.
  std::uint64_t copied() const { return copied_; }

 private:
  struct Slot {
    std::int64_t offset = -1;  // in the flat tensor; -1: reduced where it is
    at::Tensor stand_in;       // takes part in place of the gradient, which is not touched
    at::Tensor result;         // takes part in place of a gradient that keeps its tensor
    at::Tensor kept;           // the gradient's content, where the stand-in has its memory
  };

  void renew_if_kept(const Gradients& gradients, const BucketRule& rule);
  bool lies_in_slot(const at::Tensor& gradient, const Slot& slot,
                    const at::Tensor& parameter) const;
  void contribute_to_flat(Gradient& gradient, Slot& slot, bool zeros);
  at::Tensor local_in_heap(Gradient& gradient, const Slot& slot, const BucketRule& rule);
  void settle_member(Gradient& gradient, Slot& slot, bool touched);
  at::Tensor contribution(Gradient& gradient, Slot& slot, const BucketRule& rule, bool zeros);
  void start(const Gradients& gradients, const BucketRule& rule, std::size_t index,
             std::size_t count);
  void scale(const BucketRule& rule);
  // For sharded gradients (sharded_bucket.cc).
  void launch_sharded(Gradients& gradients, const BucketRule& rule);
  void send_shards(Gradients& gradients, const BucketRule& rule);
  void receive_shards(Gradients& gradients, const BucketRule& rule,
                      const std::vector<bool>& touched);
  void settle_sharded(Gradients& gradients, const BucketRule& rule,
                      const std::vector<bool>& touched);
  void note_reduced(Gradients& gradients, const BucketRule& rule);
  void copy(const at::Tensor& to, const at::Tensor& from);

  const std::vector<std::size_t> members_;
  std::vector<Slot> slots_;
  bool sparse_ = false;
  bool laid_out_ = false;
  const void* laid_out_for_ = nullptr;  // the hook
  std::uint64_t bytes_ = 0;
  std::uint64_t copied_ = 0;
  at::Tensor flat_;
  std::shared_ptr<ReduceToShards> pass_;  // under way in the ranks' heaps
  std::vector<bool> touched_;
  std::vector<at::Tensor> parts_;  // what is under way: the flat tensor, and large gradients
  c10::intrusive_ptr<c10d::Work> work_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // the hook's
};

}  // namespace dreamcomm

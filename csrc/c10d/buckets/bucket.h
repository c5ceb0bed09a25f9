// A bucket: gradients that one move reduces. Large ones are reduced where they are, in the heap;
// small ones, and all of a communication hook's, in one flat tensor, whose memory they then have.
//
// INVARIANT: a pass writes to the flat tensor's memory only where the members' gradients lie that
// it reduces. Gradients of earlier passes that somebody has kept stay as they are, as the flat
// tensor gets other memory when it has more users than itself and gradients (renew_if_kept).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "c10d/buckets/moves/heap_pass.h"
#include "c10d/buckets/parameter.h"
#include "c10d/buckets/rule.h"

namespace dreamcomm {

class Bucket {
 public:
  /// `members` index `parameters`: of one type, device and factor, or one with sparse gradients
  /// alone.
  Bucket(std::vector<std::size_t> members, const Parameters& parameters);

  const std::vector<std::size_t>& members() const { return members_; }
  std::size_t pending = 0;  // members that this pass still awaits

  /// Starts the move of the members' gradients. A gradient that is not touched here takes part as
  /// it is, by a copy, or as zeros; with `zeros` all do. It is bucket `index` of `count`.
  void launch(Parameters& parameters, const Rule& rule, std::size_t index, std::size_t count,
              bool zeros = false);
  /// Waits for what the hook has started, which may call collectives of its own.
  void await_hook() const {
    if (future_) future_->wait();
  }
  /// Waits for the group's calls, and leaves the rest to settle(). Returns whether there are any.
  bool await_calls() const;
  /// True if a reduce-scatter is under way that has ended.
  bool has_ended() const;
  bool hook_ended() const { return !future_ || future_->completed(); }
  /// Waits for the move. Gradients that are not `touched` by any rank stay as they are.
  void settle(Parameters& parameters, const Rule& rule, const std::vector<bool>& touched);
  /// Makes the flat tensor, unless it is there. Otherwise launch() does.
  void lay_out(const Parameters& parameters, const Rule& rule);
  /// Waits for a reduce-scatter, and frees what it has read.
  void complete_scatter(Parameters& parameters, const Rule& rule);
  /// Brings this rank's gradients into its heap, where they then are `grad`. Returns one tensor for
  /// each member, in the order of memory; undefined: there is none.
  std::vector<at::Tensor> place(Parameters& parameters, const Rule& rule);
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

  /// Gradients whose rows are summed by one call: small ones together, in the order of ranks, or a
  /// large one where it lies.
  struct RowsPart {
    std::vector<std::size_t> numbers;  // of members
    at::Tensor sent;
    at::Tensor received;  // this rank's rows of the sum
    WorkPtr work;
  };

  void renew_if_kept(const Parameters& parameters, const Rule& rule);
  bool lies_in_slot(const Parameter& parameter, const Slot& slot) const;
  bool lies_in_place(const Parameter& parameter, const Slot& slot) const;
  at::Tensor make_place(const Parameter& parameter, const Slot& slot, const Rule& rule) const;
  at::Tensor contribute(Parameter& parameter, Slot& slot, const Rule& rule, bool zeros);
  void copy(const at::Tensor& to, const at::Tensor& from);
  void run_hook(const Parameters& parameters, const Rule& rule, std::size_t index,
                std::size_t count);
  void scale(const Rule& rule, at::Tensor& part) const;
  void settle_member(Parameter& parameter, Slot& slot, bool touched);
  // Reduce-scatters (scatter.cc).
  void launch_scatter(Parameters& parameters, const Rule& rule);
  void launch_in_heaps(Parameters& parameters, const Rule& rule);
  void launch_rows(Parameters& parameters, const Rule& rule);
  void launch_packed(const Parameters& parameters, const Rule& rule, RowsPart part);
  void launch_alone(Parameters& parameters, const Rule& rule, std::size_t number);
  void settle_part(Parameters& parameters, const Rule& rule, const RowsPart& part,
                   const std::vector<bool>& touched);
  void settle_rows(Parameters& parameters, const Rule& rule, const std::vector<bool>& touched);
  void note_scattered(Parameters& parameters, const Rule& rule, const std::vector<bool>& touched);

  const std::vector<std::size_t> members_;
  const double factor_;  // the members'; 0: the rule's
  std::vector<Slot> slots_;
  at::Layout layout_;
  std::optional<const void*> laid_out_for_;  // the hook
  std::uint64_t bytes_ = 0;
  std::uint64_t copied_ = 0;
  at::Tensor flat_;
  std::shared_ptr<ReduceToShards> pass_;  // under way in the ranks' heaps
  std::vector<at::Tensor> parts_;         // what is under way: the flat tensor, and large gradients
  std::vector<RowsPart> rows_;            // under way, or to be settled
  WorkPtr work_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // the hook's
};

}  // namespace dreamcomm

// The tensors of one collective as the blocks of a Request.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>

#include "core/request.h"
#include "core/sharded_pass.h"

namespace dreamcomm {

/// Collects a collective's tensors. One that is not plain contiguous memory goes
/// through a temporary: stage() fills it, unstage() copies results back. Tensors
/// are kept alive as long as the call. Nothing is allocated for few plain ones.
class Call {
 public:
  Call(Kind kind, const Reduction& reduction, int root = 0)
      : kind_(kind), reduction_(reduction), root_(root) {}

  /// Each adds blocks of `sizes` bytes that follow each other in the tensor, or
  /// one block of all of it. `aside` forces a temporary (overlapping memory).
  void input(const at::Tensor& tensor, bool aside = false);
  void input(const at::Tensor& tensor, c10::ArrayRef<std::size_t> sizes, bool aside = false);
  void output(const at::Tensor& tensor, bool aside = false);
  void output(const at::Tensor& tensor, c10::ArrayRef<std::size_t> sizes, bool aside = false);
  /// One block that is input and output.
  void in_place(const at::Tensor& tensor, bool aside = false);
  /// A pass in place of blocks, on the memory of these tensors in this process's heap.
  void pass(std::shared_ptr<ShardedPass> pass, c10::ArrayRef<at::Tensor> tensors);

  /// As Request::digest.
  void laid_out(std::uint32_t digest) { digest_ = digest; }
  /// Makes it a call that this rank refuses; as Request::refusal.
  void refuse(std::string why) { refusal_ = std::move(why); }

  /// Keeps what divides an average.
  void averaged_by(const c10d::ReduceOp& op) { averaging_ = op.supplement_; }

  /// True if all tensors are plain: stage() and unstage() have nothing to do.
  bool direct() const { return staged_.empty(); }
  /// In the call's turn, before its request: earlier calls may write its inputs.
  void stage();
  void unstage();
  /// After the group has failed in this call: retires its tensors in the shared heap, as a late
  /// peer may still write there. Peers cannot reach other tensors.
  void leave_to_peers() const;
  /// Marks the call's memory on a device as in use until `stream` has reached this point. Skips
  /// memory that `is_registered` accepts: torch's allocators do not know it.
  using IsRegistered = std::function<bool(const void*)>;
  void used_on(const c10::Stream& stream, const IsRegistered& is_registered) const;
  bool any_registered(const IsRegistered& is_registered) const;
  /// `rest`: how many parts of a coalesced call follow this one.
  Request request(Clock::time_point deadline, std::size_t rest) const;

 private:
  using Blocks = c10::SmallVector<Block, 4>;
  struct Range {
    std::size_t first = 0;
    std::size_t count = 0;
  };
  struct Staged {
    at::Tensor tensor;
    at::Tensor memory;
    Range in;
    Range out;
  };

  void keep(const at::Tensor& tensor, bool plain, Range in, Range out);

  Kind kind_;
  Reduction reduction_;
  int root_;
  Blocks in_;
  Blocks out_;
  c10::SmallVector<c10::Storage, 2> plain_;  // outlives `tensor.data = ...`, too
  c10::SmallVector<Staged, 0> staged_;
  std::shared_ptr<ShardedPass> pass_;
  std::uint32_t digest_ = 0;
  std::string refusal_;
  c10::intrusive_ptr<c10d::_SupplementBase> averaging_;
};

using Calls = c10::SmallVector<Call, 1>;

/// True if the tensor's elements lie in memory one after the other, as they are.
bool is_plain(const at::Tensor& tensor);

/// A fresh contiguous tensor of the same shape and type.
at::Tensor blank_like(const at::Tensor& tensor);
/// dst <- src, without autograd.
void copy_into(const at::Tensor& dst, const at::Tensor& src);

}  // namespace dreamcomm

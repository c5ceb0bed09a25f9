// A collective call as it travels from the backend to the kernels.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/types.h"

namespace dreamcomm {

using Clock = std::chrono::steady_clock;

/// Nanoseconds of the clock that all processes of a host share.
constexpr std::int64_t to_ns(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}
inline std::int64_t now_ns() { return to_ns(Clock::now()); }

class ShardedPass;  // core/sharded_pass.h: what a sharded optimizer does

/// A contiguous run of bytes that the caller owns.
struct Block {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// One collective. All fields are the same on every rank, except the addresses.
///
///   kind            in                     out
///   barrier         -                      -
///   broadcast       root: 1 block          1 block (root: may equal in)
///   all_reduce      1 block                1 block (may equal in)
///   reduce          1 block                root: 1 block (may equal in)
///   all_gather      1 block                N blocks, each as large as in
///   gather          1 block                root: N blocks, each as large as in
///   scatter         root: N blocks         1 block
///   reduce_scatter  N equal blocks         1 block, as large as each of in
///   all_to_all      N blocks, any sizes    N blocks, any sizes
///
/// The spans must outlive the call. Blocks of in and out must not overlap
/// except where noted. A block of all_gather's out (or of gather's) may be in.
struct Request {
  Kind kind = Kind::kBarrier;
  Reduction reduction;  // dtype is set for every kind; op only where one is used
  std::span<const Block> in;
  std::span<const Block> out;
  int root = 0;
  std::uint32_t rest = 0;  // how many parts of the same coalesced call follow this one
  Clock::time_point deadline = Clock::time_point::max();
  Clock::duration excuse{};  // extra wait for peers that themselves wait for other nodes
  /// A pass over tensors in all ranks' heaps, in place of blocks: an all_reduce, reduce_scatter or
  /// all_gather of which each rank handles its elements between reading and writing. Its averages
  /// are divided as `reduction` says.
  ShardedPass* pass = nullptr;
  const Request* part_of = nullptr;  // the program's call, if this is one host's part of it
  std::uint32_t digest = 0;  // of what else has to be equal on all ranks, by the caller's own rules
  /// A barrier in place of a call that this rank does not make, and why. If some rank makes one, it
  /// ends on all ranks as a mismatch that says so.
  const std::string* refusal = nullptr;
};

/// The moment `timeout` from now; the latest there is if that lies beyond it.
constexpr Clock::time_point deadline_in(Clock::time_point now, std::chrono::milliseconds timeout) {
  const auto room = Clock::time_point::max() - now;
  return timeout >= std::chrono::floor<std::chrono::milliseconds>(room) ? Clock::time_point::max()
                                                                        : now + timeout;
}

/// Returns `deadline` plus `by`, or the latest time point if the sum is beyond it.
constexpr Clock::time_point later(Clock::time_point deadline, Clock::duration by) {
  return deadline > Clock::time_point::max() - by ? Clock::time_point::max() : deadline + by;
}

/// Describes the call for error messages: "all_reduce(SUM, 1024 x float32)". A part is described
/// after its whole call: "all_reduce(SUM, 1024 x float32): broadcast(64 bytes, root 0)".
std::string describe(const Request& request);

/// Bytes that decide the cost: those of one block times the blocks it is one of.
std::size_t payload_bytes(const Request& request);

}  // namespace dreamcomm

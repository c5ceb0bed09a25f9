// A rank's call as its peers see it: compared before any data moves.
#pragma once

#include <cstdint>
#include <string>

#include "core/request.h"

namespace dreamcomm {

/// Equal on all ranks of a correct program. It lies at the start of a page.
struct Signature {
  std::uint64_t sequence = 0;  // collectives of this group so far
  std::uint64_t bytes = 0;     // of one block; 0 where blocks may differ (all_to_all)
  std::int32_t root = 0;
  std::uint32_t rest = 0;  // further parts of the same coalesced call
  Kind kind = Kind::kBarrier;
  ReduceOp op = ReduceOp::kNone;
  DType dtype = DType::kOpaque;
  std::uint8_t row = 0;         // of the algorithm table, and whether the rank asks for heaps
  bool counted : 1 = false;     // the ranks' counts come with it: GradientCounts
  bool along_tree : 1 = false;  // as in Reduction
  bool refused : 1 = false;     // as in Request
  std::uint32_t digest : 29 = 0;
  static constexpr std::uint32_t kDigest = (std::uint32_t{1} << 29) - 1;
  static constexpr std::uint8_t kAsks = 0x80;
  // A sharded pass. `rest` counts its parameters, and `root` is a digest of them.
  static constexpr std::uint8_t kSharded = 0x7e;
  static constexpr std::uint8_t kNoRow = 0x7f;  // a call whose parts have rows of their own

  bool operator==(const Signature&) const = default;
};
static_assert(sizeof(Signature) == 32);

/// The start of each rank's first page of a call.
struct Opening {
  Signature signature;
  std::uint64_t own = 0;           // this rank's own factor of PREMUL_SUM, a double, or its count
  std::uint64_t in = 0;            // offset of its first block in its heap, plus 1; `out` likewise;
  std::uint64_t out = 0;           // 0: not in the heap, or not all blocks in one piece there
  std::uint64_t past : 16 = 0;     // AdaptiveCopy's wishes; rank 0's count
  std::uint64_t entered : 48 = 0;  // when the rank entered the call: see Arrival
};

/// When the last rank entered a call, as its peers learn it from the openings. They share one clock
/// (CLOCK_MONOTONIC of a host). Only the low 48 bits of its nanoseconds are sent: 3 days' worth.
class Arrival {
 public:
  static constexpr std::uint64_t kMask = (std::uint64_t{1} << 48) - 1;
  Arrival(std::int64_t own_ns, int own_rank) : own_(own_ns), rank_(own_rank) {}
  void see(std::uint64_t entered, int rank) {
    constexpr int kUnused = 16;
    const std::uint64_t gap = entered - static_cast<std::uint64_t>(own_);
    const std::int64_t after = static_cast<std::int64_t>(gap << kUnused) >> kUnused;
    if (after <= after_) return;
    after_ = after;
    rank_ = rank;
  }
  std::int64_t last_ns() const { return own_ + after_; }
  int last_rank() const { return rank_; }

 private:
  std::int64_t own_;
  std::int64_t after_ = 0;  // from then until the last one entered
  int rank_;
};

Signature signature_of(const Request& request, std::uint64_t sequence, std::uint8_t row);

/// "all_reduce(SUM, 4 x float32) as call 7": for the two sides of a mismatch.
std::string words(const Signature& signature);

/// " called all_reduce(SUM, 4 x float32) as call 7", or " refused its call 7".
std::string deed(const Signature& signature);

/// Bytes of the block that every rank has in this kind of call.
std::size_t block_bytes(const Request& request);

}  // namespace dreamcomm

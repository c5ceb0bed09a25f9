// The memory of one rank that all ranks of a group map on their GPUs, and what goes
// between a kernel and the host.
//
//   Mark of rank 0, 1, ... | Slot of (block 0, rank 0), (0, 1) ... (block 1, rank 0) ...
//   | two pages of block 0, of block 1, ... | letters of (block 0, even rounds, rank 0),
//   (0, even, 1) ... (0, odd, 0) ... (1, even, 0) ...
//
// Each block of a kernel has flags and pages of its own: block b of all ranks is a
// little world that needs no other block. So calls may have any number of blocks, and
// a call need not wait until the blocks of the call before it are done on other ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/types.h"
#include "gpu/collectives/device.h"
#include "gpu/collectives/vec16.h"

namespace dreamcomm::gpu {

/// A call as its ranks compare it: equal on all of them.
struct CallInfo {
  Kind kind = Kind::kBarrier;
  ReduceOp op = ReduceOp::kNone;
  DType dtype = DType::kOpaque;
  std::uint8_t row = 0;  // of the table of algorithms
  std::int32_t root = 0;
  std::uint32_t blocks = 0;      // of the kernel
  std::uint32_t page_bytes = 0;  // of the layout
  std::uint64_t bytes = 0;       // of one tensor or block

  bool operator==(const CallInfo&) const = default;
};

/// 32 bits of the card, never 0.
constexpr std::uint32_t digest(const CallInfo& info) {
  std::uint64_t sum = info.bytes * 0x9E3779B97F4A7C15U;
  const std::uint64_t parts[] = {static_cast<std::uint64_t>(info.kind),
                                 static_cast<std::uint64_t>(info.op),
                                 static_cast<std::uint64_t>(info.dtype),
                                 info.row,
                                 static_cast<std::uint32_t>(info.root),
                                 info.blocks,
                                 info.page_bytes};
  for (const std::uint64_t part : parts) {
    sum = (sum ^ part) * 0xBF58476D1CE4E5B9U;
    sum ^= sum >> 29U;
  }
  return static_cast<std::uint32_t>(sum >> 32U) | 1U;
}

/// Written by one rank into another's window: the rounds that its block has published.
/// A word is (round << 32 | digest of the call); rounds take the two words in turns.
struct alignas(kSector) Slot {
  std::uint64_t published[2];
};

/// Eight bytes of a tensor, written by one rank into another's window. Each half is a number that
/// is read and written as one: four bytes, and above them the flag of the round, so that who sees
/// the flag has the bytes. 0: nothing has come.
struct alignas(kPackBytes) LLPacket {
  std::uint64_t half[2];
};

/// LLPackets of a block from each rank in a round carry so much.
inline constexpr std::size_t kPacketBytes = 8;
inline constexpr std::size_t kPackets = 512;
inline constexpr std::size_t kBytesByPackets = kPackets * kPacketBytes;
inline constexpr int kPacketBlocks = 16;  // that have them, the first ones

/// Written by one rank into all windows, its own as well.
struct alignas(kSector) Mark {
  std::uint64_t gone;   // not 0: the writer has aborted the group
  std::uint64_t stamp;  // what the writer wrote to show that it reaches this window
  std::uint64_t told;   // not 0: `card` is there
  CallInfo info;        // the call in which the writer gave up
};
static_assert(sizeof(Slot) == kSector && sizeof(Mark) == kSector);

/// What a kernel that gave up tells the host, in memory that both map: one for a window,
/// never reset. Only one GPU writes it.
struct Report {
  enum Reason : std::uint64_t {
    kNone = 0,
    kTimeout = 1,
    kAborted = 2,
    kPeerGone = 3,  // `missing` has given up; this rank itself: in a call before
    kMismatch = 4,  // a peer made another call
    kSizes = 5,     // all_to_all: `missing` gives `given` bytes to `taker`, who expects others
  };
  std::uint64_t claimed;  // by the lane that writes the rest
  std::uint64_t reason;   // published last
  std::int32_t rank;
  std::int32_t missing;      // the rank waited for, or that called something else
  std::int64_t patience_ns;  // the longest wait of the call
  std::uint64_t sequence;    // of the call in the group, from 1 on, as this rank counts
  std::uint32_t round;       // of this block
  std::uint32_t turn;        // of this call, from 0 on
  std::int32_t block;
  std::int32_t taker;
  std::uint64_t given;
  std::uint64_t expected;
  CallInfo info;
  std::uint64_t heard;  // of a mismatch: not 0: `theirs` is the call of `missing`
  CallInfo theirs;
};

/// What lies at the start of a rank's page in the first round of calls that ask whether
/// tensors are registered; as in algorithms/signature.h. Sizes: all_to_all only.
struct Opening {
  std::uint64_t in;
  std::uint64_t out;
  std::uint64_t in_bytes[kMaxRanks];
  std::uint64_t out_bytes[kMaxRanks];
};

/// What the host tells a running kernel, likewise.
struct Control {
  std::uint64_t abort;      // not 0: give up
  std::uint64_t elsewhere;  // for the host: not 0: a rank of another host has given up
};

/// Offsets into a window; equal on all ranks.
struct Layout {
  std::size_t page_bytes = std::size_t{256} << 10;  // of one block; a multiple of kSector
  int blocks = kMaxBlocks;                          // that have pages

  static constexpr std::size_t mark(int writer) {
    return static_cast<std::size_t>(writer) * sizeof(Mark);
  }
  static constexpr std::size_t slot(int block, int writer) {
    return mark(kMaxRanks) + static_cast<std::size_t>(block * kMaxRanks + writer) * sizeof(Slot);
  }
  constexpr std::size_t page(int block, std::uint32_t round) const {
    return slot(blocks, 0) + (2 * static_cast<std::size_t>(block) + (round & 1U)) * page_bytes;
  }
  constexpr std::size_t packets(int block, std::uint32_t round, int writer) const {
    const std::size_t row = (2 * static_cast<std::size_t>(block) + (round & 1U)) * kMaxRanks +
                            static_cast<std::size_t>(writer);
    return page(blocks, 0) + row * kPackets * sizeof(LLPacket);
  }
  constexpr std::size_t bytes() const {
    return packets(blocks < kPacketBlocks ? blocks : kPacketBlocks, 0, 0);
  }
};

/// Whether letters of so many blocks carry a tensor.
constexpr bool fits_packets(std::size_t bytes, int blocks) {
  return blocks <= kPacketBlocks && bytes <= static_cast<std::size_t>(blocks) * kBytesByPackets;
}

/// Makes a window of memory of the host, before any rank maps it (and to be copied to a
/// device): as if round `start` had been published by all.
inline void prepare_window(std::byte* window, const Layout& layout, std::uint32_t start) {
  std::memset(window, 0, layout.bytes());
  for (int block = 0; block < layout.blocks; ++block) {
    for (int writer = 0; writer < kMaxRanks; ++writer) {
      auto* slot = reinterpret_cast<Slot*>(window + Layout::slot(block, writer));
      slot->published[0] = slot->published[1] = std::uint64_t{start} << 32U;
    }
  }
}

}  // namespace dreamcomm::gpu

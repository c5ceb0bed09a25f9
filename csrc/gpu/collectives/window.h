// The memory of one rank that all ranks of a group map on their GPUs, and the memory by which a
// kernel and the host communicate.
//
//   Mark of rank 0, 1, ... | Slot of (block 0, rank 0), (0, 1) ... (block 1, rank 0) ...
//   | two pages of block 0, of block 1, ... | packets of (block 0, even rounds, rank 0),
//   (0, even, 1) ... (0, odd, 0) ... (1, even, 0) ...
//
// Each block of a kernel has its own flags and pages. Blocks with the same number on all ranks
// work together, independently of other blocks. So calls may have any number of blocks, and a call
// does not wait until the blocks of the previous call are done on other ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/types.h"
#include "gpu/collectives/device.h"
#include "gpu/collectives/vec16.h"

namespace dreamcomm::gpu {

/// The properties of a call that all its ranks must agree on.
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

/// A hash of the call in 32 bits, never 0.
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

/// The rounds that a block of one rank has published, written by that rank into another's window.
/// A word is (round << 32 | digest of the call). Even and odd rounds use different words.
struct alignas(kSector) Slot {
  std::uint64_t published[2];
};

/// Eight bytes of a tensor, written by one rank into another's window. Each half is read and
/// written in one access: four bytes, and above them the flag of the round. A reader that sees the
/// flag has the bytes. 0: nothing has arrived.
struct alignas(kPackBytes) LLPacket {
  std::uint64_t half[2];
};

/// Capacity of the packets that one block gets from each rank in a round.
inline constexpr std::size_t kPacketBytes = 8;
inline constexpr std::size_t kPackets = 512;
inline constexpr std::size_t kBytesByPackets = kPackets * kPacketBytes;
inline constexpr int kPacketBlocks = 16;  // only the first blocks have packets

/// The state of one rank, which it writes into all windows, its own as well.
struct alignas(kSector) Mark {
  std::uint64_t failed;    // not 0: the writer has aborted the group
  std::uint64_t stamp;     // what the writer wrote to show that it reaches this window
  std::uint64_t has_info;  // not 0: `info` is there
  CallInfo info;           // the call that failed on the writer
};
static_assert(sizeof(Slot) == kSector && sizeof(Mark) == kSector);

/// A failed kernel's report to the host, in memory that both map. There is one for a window, and
/// it is never reset. Only one GPU writes it.
struct Report {
  enum Reason : std::uint64_t {
    kNone = 0,
    kTimeout = 1,
    kAborted = 2,
    kPeerFailed = 3,  // `missing` has failed; if it is this rank itself: in an earlier call
    kMismatch = 4,    // a peer made another call
    kSizes = 5,       // all_to_all: `missing` gives `given` bytes to `taker`, which expects others
  };
  std::uint64_t claimed;  // not 0: a lane writes the rest
  std::uint64_t reason;   // published last
  std::int32_t rank;
  std::int32_t missing;      // the awaited rank, or the rank that made another call
  std::int64_t patience_ns;  // the longest wait of the call
  std::uint64_t sequence;    // of the call in the group, from 1 on, as this rank counts
  std::uint32_t round;       // of this block
  std::uint32_t turn;        // of this call, from 0 on
  std::int32_t block;
  std::int32_t taker;
  std::uint64_t given;
  std::uint64_t expected;
  CallInfo info;
  std::uint64_t has_theirs;  // of a mismatch: not 0: `theirs` is the call of `missing`
  CallInfo theirs;
};

/// The start of a rank's page in the first round of calls whose ranks have to learn which tensors
/// are registered, as in algorithms/signature.h. Sizes: all_to_all only.
struct Opening {
  std::uint64_t in;
  std::uint64_t out;
  std::uint64_t in_bytes[kMaxRanks];
  std::uint64_t out_bytes[kMaxRanks];
};

/// The host's orders to a running kernel, in memory that both map.
struct Control {
  std::uint64_t abort;              // not 0: the kernel has to end
  std::uint64_t other_node_failed;  // for the host: not 0: a call has failed on another node
};

/// Offsets into a window; equal on all ranks.
struct Layout {
  std::size_t page_bytes = std::size_t{256} << 10;  // of one block; a multiple of kSector
  int blocks = kMaxBlocks;                          // blocks that have pages

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

/// True if a tensor fits into the packets of so many blocks.
constexpr bool fits_packets(std::size_t bytes, int blocks) {
  return blocks <= kPacketBlocks && bytes <= static_cast<std::size_t>(blocks) * kBytesByPackets;
}

/// Initialises a window in memory of the host as if all had published round `start`, before any
/// rank maps it. The caller may copy it to a device.
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

// The memory of one rank that all ranks of a group map, and its layout.
//
//   Header | page 0 | page 1 | Outbox for rank 0, 1, ... | Inbox from rank 0, 1, ...
//
// Every field has one writer, named beside it, except the doorbell.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/flag.h"
#include "core/types.h"

namespace dreamcomm {

inline constexpr std::uint32_t kProtocolVersion = 11;

/// A rank's membership in the group: the values of Header::status.
enum class Status : std::uint32_t { kActive = 0, kLeft = 1, kFailed = 2 };

/// The current call of a rank, for its peers' messages and for tools.
struct alignas(kLine) Progress {
  Gauge sequence;     // of the collective it entered last; 0: none yet
  Gauge kind;         // Kind of that call
  Gauge bytes;        // of one of its blocks
  Gauge entered_ns;   // when, CLOCK_MONOTONIC
  Gauge inside;       // 1 until the call returned
  Gauge waiting_for;  // rank it waits for, or -1; of the moment looked_ns
  Gauge cpu;          // where the thread ran that made the call
  Gauge before;       // Kind of the call before that one, if there was one
  Gauge away;         // 1 while it waits for ranks of other hosts
  Gauge failed_in;    // number of the last call that ended with an error here
  Gauge looked_ns;    // when it last checked its peers in a long wait, CLOCK_MONOTONIC
};

/// The messages of a rank that are under way: how many, and the oldest of them.
struct alignas(kLine) Correspondence {
  Gauge pending;   // if it is 0, the others mean nothing
  Gauge kind;      // Kind::kSend or kRecv
  Gauge peer;      // the other side; -1: any
  Gauge bytes;     // of it
  Gauge since_ns;  // when it was issued, CLOCK_MONOTONIC
};

/// A rank's counters of calls of one kind.
struct Tally {
  Gauge calls;
  Gauge sent;      // bytes of this rank that peers read, counted per reader
  Gauge received;  // bytes that this rank read from peers
  Gauge in_place;  // of the calls, those on tensors in heaps
};

/// A rank's state in a multi-node group; the header's other fields show its parts within the
/// host. Ranks in it are the group's.
struct MultiNodeState {
  static constexpr std::size_t kMostNumbers = 512;
  std::array<std::int32_t, kMostNumbers> numbers;  // in the group, of the host's ranks
  Progress calls;                                  // waiting_for: a rank of another host
  Correspondence messages;                         // with ranks of other hosts
  std::array<Tally, kKinds> tallies;               // calls, and bytes between hosts
};

/// Identifies the window, for tools that see only the memory.
struct Identity {
  std::uint32_t version;  // kProtocolVersion; at the same place in all versions
  std::int32_t pid;       // as the rank's own process sees it
  std::int32_t rank;
  std::int32_t size;                  // ranks of the group
  std::int32_t here;                  // of these on this host; 0: it has one host
  std::array<std::uint8_t, 16> team;  // equal for the ranks of a group: rank 0's nonce
  std::array<char, 96> group;         // its name
};

struct Header {
  Identity identity;                        // owner; all except version and pid before `named`
  std::array<std::uint8_t, 16> nonce;       // owner, before the window is handed over
  std::uint32_t rank;                       // owner, likewise
  Flag named;                               // owner: 1 once the group is made on its side
  Flag round;                               // owner: rounds published (transport/rounds.h)
  Flag status;                              // owner: Status
  std::array<char, 8 * kLine> reason;       // owner, before status says kFailed
  Progress progress;                        // owner
  Correspondence correspondence;            // owner, under its tag matcher's lock
  std::array<Tally, kKinds> tallies;        // owner
  Flag present;                             // owner: see comm/barrier/monitored_barrier.h
  Gauge barrier_ends_ns;                    // owner: likewise, when its timeout ends
  Gauge barrier_began_ns;                   // owner: likewise
  std::array<Gauge, 8> monitored_barriers;  // owner: likewise
  Flag passed;                              // owner, rank 0: likewise
  Flag verdict;                             // owner, rank 0: likewise
  std::array<std::array<char, 16 * kLine>, 2> verdict_text;  // owner, before verdict
  Doorbell doorbell;     // peers ring it, the owner sleeps at it
  MultiNodeState whole;  // owner; its messages under their tag matcher's lock
};

/// The announcement of a message to its receiver. Small messages travel inside.
struct alignas(kLine) Envelope {
  static constexpr std::size_t kInline = 1024 - 24;
  std::uint64_t tag;
  std::uint64_t bytes;
  std::uint32_t number;     // counts the messages from this sender to this receiver
  std::uint32_t is_inline;  // the bytes are in `data`; no grant follows
  std::array<std::byte, kInline> data;
};
static_assert(sizeof(Envelope) == 1024);

/// In the sender's window, one per receiver. Written by the sender alone.
struct Outbox {
  static constexpr std::uint32_t kEnvelopes = 16;
  static constexpr std::uint32_t kBuffers = 2;
  Flag announced;     // envelopes written
  Flag grants_taken;  // grants read (frees their places)
  Flag filled;        // buffers filled with message bytes
  std::array<Envelope, kEnvelopes> envelopes;
  // kBuffers buffers of message_bytes follow in the window.
};

/// A receiver's answer to an envelope: send that message's bytes now, or drop it.
struct ClearToSend {
  std::uint32_t number;
  std::uint32_t refused;
  std::uint64_t expected;  // bytes the receiver has room for
};

/// In the receiver's window, one per sender. Written by the receiver alone.
struct Inbox {
  static constexpr std::uint32_t kGrants = 16;
  Flag envelopes_taken;  // envelopes read (frees their places)
  Flag granted;          // grants written
  Flag drained;          // buffers read
  alignas(kLine) std::array<ClearToSend, kGrants> grants;
};

/// Offsets into a window. Equal on all ranks of a group.
class WindowLayout {
 public:
  WindowLayout(int size, std::size_t page_bytes, std::size_t message_bytes);

  int size() const { return size_; }
  std::size_t page_bytes() const { return page_bytes_; }
  std::size_t message_bytes() const { return message_bytes_; }
  std::size_t bytes() const { return inboxes_ + static_cast<std::size_t>(size_) * sizeof(Inbox); }

  Header& header(std::byte* window) const;
  std::byte* page(std::byte* window, std::uint32_t round) const {
    return window + pages_ + (round & 1) * page_bytes_;
  }
  Outbox& outbox(std::byte* window, int receiver) const;
  std::byte* buffer(std::byte* window, int receiver, std::uint32_t index) const;
  Inbox& inbox(std::byte* window, int sender) const;

  /// Constructs header and boxes in zeroed memory, with all round counters at
  /// `start` (tests let them begin shortly before they wrap around).
  void construct(std::byte* window, int rank, std::uint32_t start) const;

 private:
  std::size_t outbox_stride() const { return sizeof(Outbox) + Outbox::kBuffers * message_bytes_; }
  int size_;
  std::size_t page_bytes_;
  std::size_t message_bytes_;
  std::size_t pages_;
  std::size_t outboxes_;
  std::size_t inboxes_;
};

}  // namespace dreamcomm

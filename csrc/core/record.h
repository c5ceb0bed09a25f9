// The record of an operation, and of its parts.
#pragma once

#include <array>
#include <cstdint>

#include "core/types.h"

namespace dreamcomm {

/// A collective, or a message, as one rank saw it. Times are nanoseconds of the clock that all
/// processes of a host share.
struct Record {
  enum class State : std::uint8_t { kRunning, kDone, kFailed };
  std::int64_t number = 0;      // of the collective in its group, or of the message, counted
                                // from 0 for each sender and receiver
  std::int64_t bytes = 0;       // of a block; of a message
  std::int64_t entered_ns = 0;  // a message: when it was asked for
  std::int64_t arrived_ns = 0;  // when the last rank entered the collective; 0: not known (yet)
  std::int64_t ended_ns = 0;    // 0: not yet
  std::int32_t peer = -1;       // that last rank; of a message, the other side
  std::int32_t root = 0;
  Kind kind = Kind::kBarrier;
  ReduceOp op = ReduceOp::kNone;
  DType dtype = DType::kOpaque;
  std::uint8_t row = 0;  // of the algorithm table, or one of those below
  State state = State::kRunning;
  bool in_place = false;  // tensors in heaps were used in place

  static constexpr std::uint8_t kSharded = 0xfd;    // a sharded pass
  static constexpr std::uint8_t kByLeaders = 0xfe;  // between hosts
  static constexpr std::uint8_t kByCarriers = 0xff;

  using Words = std::array<std::int64_t, 7>;
  /// The record as words, for a SeqlockRing.
  Words words() const {
    const auto low = [](auto value) { return static_cast<std::int64_t>(value) & 0xff; };
    return {number,
            bytes,
            entered_ns,
            arrived_ns,
            ended_ns,
            (std::int64_t{peer} & 0xffffffff) | (std::int64_t{root} << 32),
            low(kind) | (low(op) << 8) | (low(dtype) << 16) | (low(row) << 24) |
                (low(state) << 32) | (low(in_place) << 40)};
  }
  static Record of(const Words& words) {
    const auto byte = [&](int i) { return static_cast<std::uint8_t>(words[6] >> (8 * i)); };
    return {.number = words[0],
            .bytes = words[1],
            .entered_ns = words[2],
            .arrived_ns = words[3],
            .ended_ns = words[4],
            .peer = static_cast<std::int32_t>(words[5]),
            .root = static_cast<std::int32_t>(words[5] >> 32),
            .kind = static_cast<Kind>(byte(0)),
            .op = static_cast<ReduceOp>(byte(1)),
            .dtype = static_cast<DType>(byte(2)),
            .row = byte(3),
            .state = static_cast<State>(byte(4)),
            .in_place = byte(5) != 0};
  }

  bool operator==(const Record&) const = default;

  /// How long this rank waited for the last rank to enter.
  std::int64_t waited_ns() const { return arrived_ns > entered_ns ? arrived_ns - entered_ns : 0; }
};

/// The rank that entered a collective last, and when; -1: not known.
struct LastToCome {
  std::int64_t at_ns = 0;
  int rank = -1;
};

/// A rank's work on a collective's bytes: the lanes of a timeline. kBetween: it waits for
/// messages between hosts.
enum class Phase : std::uint8_t { kWait, kCopyIn, kReduce, kCopyOut, kBetween };

/// Consecutive work of one phase.
struct Span {
  std::int64_t call = 0;  // Record::number
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  Phase phase = Phase::kWait;

  using Words = std::array<std::int64_t, 4>;
  Words words() const { return {call, begin_ns, end_ns, static_cast<std::int64_t>(phase)}; }
  static Span of(const Words& words) {
    return {.call = words[0],
            .begin_ns = words[1],
            .end_ns = words[2],
            .phase = static_cast<Phase>(words[3])};
  }
  bool operator==(const Span&) const = default;
};

}  // namespace dreamcomm

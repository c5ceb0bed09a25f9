// What is noted of an operation, and of its parts.
#pragma once

#include <array>
#include <cstdint>

#include "core/types.h"

namespace dreamcomm {

/// A collective, or a message, as one rank saw it. Times are nanoseconds of the clock that all
/// processes of a host share.
struct Record {
  enum class State : std::uint8_t { kRunning, kDone, kFailed };
  std::int64_t number = 0;      // of the collective in its group; of a message, among those from
                                // its sender to its receiver, from 0 on
  std::int64_t bytes = 0;       // of a block; of a message
  std::int64_t entered_ns = 0;  // a message: when it was asked for
  std::int64_t arrived_ns = 0;  // when the last rank entered the collective; 0: not known (yet)
  std::int64_t ended_ns = 0;    // 0: not yet
  std::int32_t peer = -1;       // that last rank; of a message, the other side
  std::int32_t root = 0;
  Kind kind = Kind::kBarrier;
  ReduceOp op = ReduceOp::kNone;
  DType dtype = DType::kOpaque;
  std::uint8_t row = 0;  // of the algorithm table
  State state = State::kRunning;
  bool in_place = false;  // tensors in heaps were used where they lie
  std::uint16_t unused = 0;

  /// How long this rank waited for the last one to come.
  std::int64_t waited_ns() const { return arrived_ns > entered_ns ? arrived_ns - entered_ns : 0; }
};

/// What a rank does with a collective's bytes: the lanes of a timeline.
enum class Phase : std::uint8_t { kWait, kCopyIn, kReduce, kCopyOut };

/// Consecutive work of one phase.
struct Span {
  std::int64_t call = 0;  // Record::number
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  Phase phase = Phase::kWait;
  std::array<std::uint8_t, 7> unused{};
};

}  // namespace dreamcomm

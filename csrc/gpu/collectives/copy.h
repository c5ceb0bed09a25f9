// Copies by the lanes of a block.
//
// Lane l takes pieces l, l + lanes, ... so that neighbours read neighbouring pieces. Each lane
// starts several loads before its first store: the more bytes are in flight, the closer a GPU
// gets to the speed of its memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/collectives/target.h"
#include "gpu/collectives/vec16.h"

namespace dreamcomm::gpu {

inline constexpr int kCopyDeep = 8;

/// Copies whole pieces, whose size suits the alignment of all addresses. Returns where they end.
template <typename Piece, Lanes L>
DREAMCOMM_DEVICE std::size_t copy_pieces(const L& lanes_of, std::byte* to, std::byte* also,
                                         const std::byte* from, std::size_t begin,
                                         std::size_t bytes) {
  const auto lanes = static_cast<std::size_t>(lanes_of.lanes());
  const std::size_t pieces = (bytes - begin) / sizeof(Piece);
  const auto* source = reinterpret_cast<const Piece*>(from + begin);
  auto* first = reinterpret_cast<Piece*>(to + begin);
  auto* second = reinterpret_cast<Piece*>(also == nullptr ? nullptr : also + begin);
  for (std::size_t at = static_cast<std::size_t>(lanes_of.lane()); at < pieces;
       at += kCopyDeep * lanes) {
    Piece under_way[kCopyDeep] = {};
    for (int d = 0; d < kCopyDeep; ++d) {
      const std::size_t index = at + static_cast<std::size_t>(d) * lanes;
      if (index < pieces) under_way[d] = source[index];
    }
    for (int d = 0; d < kCopyDeep; ++d) {
      const std::size_t index = at + static_cast<std::size_t>(d) * lanes;
      if (index >= pieces) break;
      first[index] = under_way[d];
      if (second != nullptr) second[index] = under_way[d];
    }
  }
  return begin + pieces * sizeof(Piece);
}

/// memcpy by all lanes, to one place or two; does nothing if `to` is the source itself.
template <Lanes L>
DREAMCOMM_DEVICE_LOOP void copy(const L& lanes, std::byte* to, std::byte* also,
                                const std::byte* from, std::size_t bytes) {
  if (to == from) return;
  lanes.count(bytes, 1, also == nullptr ? 1 : 2);
  const std::uintptr_t all = reinterpret_cast<std::uintptr_t>(to) |
                             reinterpret_cast<std::uintptr_t>(also) |
                             reinterpret_cast<std::uintptr_t>(from);
  std::size_t done = 0;
  if (all % kPackBytes == 0) {
    done = copy_pieces<Pack<std::uint64_t>>(lanes, to, also, from, done, bytes);
  } else if (all % 4 == 0) {
    done = copy_pieces<std::uint32_t>(lanes, to, also, from, done, bytes);
  } else if (all % 2 == 0) {
    done = copy_pieces<std::uint16_t>(lanes, to, also, from, done, bytes);
  }
  copy_pieces<std::uint8_t>(lanes, to, also, from, done, bytes);
}

/// The lanes of a block in teams of equal size, each with its own work; lanes that are left over
/// belong to no team.
template <Lanes L>
class Team {
 public:
  DREAMCOMM_DEVICE Team(const L& all, int teams) : all_(all), lanes_(all.lanes() / teams) {}
  DREAMCOMM_DEVICE int number() const { return all_.lane() / lanes_; }
  DREAMCOMM_DEVICE int lane() const { return all_.lane() % lanes_; }
  DREAMCOMM_DEVICE int lanes() const { return lanes_; }
  DREAMCOMM_DEVICE void count(std::size_t bytes, int reads, int writes) const {
    if (lane() == 0) all_.count_by_one(bytes, reads, writes);
  }

 private:
  const L& all_;
  const int lanes_;
};

struct CopyJob {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
};

/// Several memcpys side by side, each by a team of lanes. One after the other, a short one would
/// only begin when the previous one is nearly done. `job_of` returns each job, from 0 on.
template <Lanes L, typename JobOf>
DREAMCOMM_DEVICE void copy_each(const L& lanes, int jobs, const JobOf& job_of) {
  if (jobs < 1) return;
  const int teams = jobs < lanes.lanes() ? jobs : lanes.lanes();
  const Team<L> team(lanes, teams);
  if (team.number() >= teams) return;
  for (int number = team.number(); number < jobs; number += teams) {
    const CopyJob job = job_of(number);
    copy(team, job.to, nullptr, job.from, job.bytes);
  }
}

}  // namespace dreamcomm::gpu

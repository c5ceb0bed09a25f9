// LL packets between block b of all ranks, in the only round of a call of few bytes.
//
// Each rank writes packets into its peers' windows, with the flag of the round, and then its
// word (block_rounds.h). The word is not ordered after the call's own accesses. It is ordered
// after those of earlier calls, because a rank's kernels end one after another.
// INVARIANT: two alternating places suffice, as for pages. A rank that writes round r has seen
// all ranks in the previous call, so they have left the call before that one, and no longer read
// packets of r-2. The reader clears the places, because old packets would otherwise stay there
// through any number of calls without packets. Words are compared before anything that packets
// carried is stored.
#pragma once

#include "gpu/collectives/block_rounds.h"

namespace dreamcomm::gpu {

template <Target T>
class LLPackets {
 public:
  DREAMCOMM_DEVICE LLPackets(const T& target, const KernelArgs& args, const BlockRounds<T>& rounds)
      : target_(target), args_(args), rounds_(rounds) {}

  /// The flag of the coming round, in the upper 32 bits of each half; never 0.
  DREAMCOMM_DEVICE std::uint64_t flag() const {
    return std::uint64_t{2 * rounds_.coming() + 1} << 32U;
  }
  DREAMCOMM_DEVICE void send_all(std::size_t number, const LLPacket& packet) const {
    for (int peer = 0; peer < args_.size; ++peer) {
      if (peer != args_.rank) target_.write_packet(place(peer, args_.rank) + number, packet);
    }
  }
  DREAMCOMM_DEVICE LLPacket look(int peer, std::size_t number) const {
    return target_.read_packet(place(args_.rank, peer) + number);
  }
  /// Waits for a peer's packet; `packet` holds the result of an earlier look(). Returns false if
  /// the block has to end.
  DREAMCOMM_DEVICE bool take(int peer, std::size_t number, LLPacket& packet) const {
    const auto is_there = [&] { return has_arrived(packet = look(peer, number)); };
    return has_arrived(packet) || rounds_.wait_for(peer, is_there);
  }
  /// Clears the places of all packets with that number, once they have been taken.
  DREAMCOMM_DEVICE void empty(std::size_t number) const {
    for (int peer = 0; peer < args_.size; ++peer) {
      if (peer != args_.rank) target_.write_packet(place(args_.rank, peer) + number, LLPacket{});
    }
  }

 private:
  /// The place in the window of `owner` for packets from `writer`.
  DREAMCOMM_DEVICE LLPacket* place(int owner, int writer) const {
    return reinterpret_cast<LLPacket*>(
        args_.windows[owner] + args_.layout.packets(target_.block(), rounds_.coming(), writer));
  }
  DREAMCOMM_DEVICE bool has_arrived(const LLPacket& packet) const {
    constexpr std::uint64_t kFlag = std::uint64_t{0xFFFFFFFF} << 32U;
    return (packet.half[0] & kFlag) == flag() && (packet.half[1] & kFlag) == flag();
  }

  const T& target_;
  const KernelArgs& args_;
  const BlockRounds<T>& rounds_;
};

}  // namespace dreamcomm::gpu

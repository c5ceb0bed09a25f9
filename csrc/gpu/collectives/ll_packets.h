// LLPackets between block b of all ranks, in the only round of a call of few bytes.
//
// Each rank writes letters into its peers' windows, with the flag of the round, and then its
// word (block_rounds.h), which none of the call's own accesses has to be ordered before. Those
// of calls before are: kernels of a rank end one after another. INVARIANT: two places in turns
// suffice, as for pages: who writes round r has seen all ranks in the call before, so that they
// have left the one before that, and with it whatever letters of r-2 they had. The reader
// empties the places, as calls without letters leave old ones there for any time. Words are
// compared before anything that letters carried is stored.
#pragma once

#include "gpu/collectives/block_rounds.h"

namespace dreamcomm::gpu {

template <Target T>
class LLPackets {
 public:
  DREAMCOMM_DEVICE LLPackets(const T& target, const KernelArgs& args, const BlockRounds<T>& rounds)
      : target_(target), args_(args), rounds_(rounds) {}

  /// Above the bytes of each half; never 0.
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
  /// A rank's letter for this one, which was looked for before; false to give up.
  DREAMCOMM_DEVICE bool take(int peer, std::size_t number, LLPacket& packet) const {
    const auto is_there = [&] { return has_come(packet = look(peer, number)); };
    return has_come(packet) || rounds_.wait_for(peer, is_there);
  }
  /// After all letters of that number were taken: their places are free again.
  DREAMCOMM_DEVICE void empty(std::size_t number) const {
    for (int peer = 0; peer < args_.size; ++peer) {
      if (peer != args_.rank) target_.write_packet(place(args_.rank, peer) + number, LLPacket{});
    }
  }

 private:
  /// Where `writer` writes to `owner`.
  DREAMCOMM_DEVICE LLPacket* place(int owner, int writer) const {
    return reinterpret_cast<LLPacket*>(
        args_.windows[owner] + args_.layout.packets(target_.block(), rounds_.coming(), writer));
  }
  DREAMCOMM_DEVICE bool has_come(const LLPacket& packet) const {
    constexpr std::uint64_t kFlag = std::uint64_t{0xFFFFFFFF} << 32U;
    return (packet.half[0] & kFlag) == flag() && (packet.half[1] & kFlag) == flag();
  }

  const T& target_;
  const KernelArgs& args_;
  const BlockRounds<T>& rounds_;
};

}  // namespace dreamcomm::gpu

// all_reduce of few bytes, by the low-latency protocol of NCCL ("LL"): each rank writes its input,
// with flags, into all windows, and adds up what arrives in its own window. Data crosses once from
// rank to rank, without a fence. (6(N - 1) + 2)NS: packets have twice the bytes, and are cleared.
#pragma once

#include <bit>

#include "gpu/collectives/ll_packets.h"
#include "gpu/collectives/staged.h"

namespace dreamcomm::gpu::rows {

/// The elements that one packet carries.
template <typename E>
struct Items {
  static constexpr int kCount = static_cast<int>(kPacketBytes / sizeof(E));
  E item[kCount];
};
struct Halves {
  std::uint32_t at[2];
};

template <typename E>
DREAMCOMM_DEVICE Items<E> items_in(const LLPacket& packet) {
  return std::bit_cast<Items<E>>(Halves{
      {static_cast<std::uint32_t>(packet.half[0]), static_cast<std::uint32_t>(packet.half[1])}});
}
template <typename E>
DREAMCOMM_DEVICE LLPacket packet_of(const Items<E>& items, std::uint64_t flag) {
  const auto halves = std::bit_cast<Halves>(items);
  return {{flag | halves.at[0], flag | halves.at[1]}};
}

/// One block's part of a call; packet `i` carries the elements from i * kCount on.
template <typename F, Target T>
struct Flagged {
  using Element = typename F::Element;
  using Carried = Items<Element>;
  static constexpr auto kItems = static_cast<std::size_t>(Carried::kCount);
  Block<T>& block;
  LLPackets<T> ll;
  const Element* in;
  Element* out;
  std::size_t count;  // elements

  DREAMCOMM_DEVICE std::size_t packets() const { return chunks(count, kItems); }
  DREAMCOMM_DEVICE Carried own(std::size_t number) const {
    Carried items{};
    for (std::size_t i = 0; i < kItems; ++i) {
      if (number * kItems + i < count) items.item[i] = in[number * kItems + i];
    }
    return items;
  }
  DREAMCOMM_DEVICE void send(std::size_t number, const Carried& items) const {
    ll.send_all(number, packet_of(items, ll.flag()));
  }
  /// Adds up in rank order; returns false if the block has to end.
  DREAMCOMM_DEVICE bool add_up(std::size_t number, const Carried& mine, Carried& sum) const {
    constexpr int kAhead = 4;  // ranks whose packets are read at once
    Partial<F, Carried::kCount> partial{};
    for (int first = 0; first < block.size(); first += kAhead) {
      LLPacket packets[kAhead] = {};
      for (int i = 0; i < kAhead; ++i) {
        const int peer = first + i;
        if (peer >= block.size() || peer == block.rank()) continue;
        packets[i] = ll.look(peer, number);
      }
      for (int i = 0; i < kAhead; ++i) {
        const int peer = first + i;
        if (peer >= block.size()) break;
        const bool is_own = peer == block.rank();
        if (!is_own && !ll.take(peer, number, packets[i])) return false;
        const Carried operand = is_own ? mine : items_in<Element>(packets[i]);
        peer == 0 ? partial.start(operand.item) : partial.join(block.args.info.op, operand.item);
      }
    }
    partial.end(block.recipe(), sum.item);
    return true;
  }
  /// Stores the sums, and clears the places of their packets.
  DREAMCOMM_DEVICE void store(std::size_t number, const Carried& sum) const {
    for (std::size_t i = 0; i < kItems; ++i) {
      if (number * kItems + i < count) out[number * kItems + i] = sum.item[i];
    }
    ll.empty(number);
  }
};

/// Calls may_begin() itself, so that the first elements are loaded during that check.
template <typename F, Target T>
DREAMCOMM_DEVICE void one_shot_flagged(Block<T>& block) {
  using Element = typename F::Element;
  const KernelArgs& args = block.args;
  const BlockChunks mine = block.spread(args.bytes, kBytesByPackets);
  const Range part = mine.count() > 0 ? mine.at(0) : Range{};
  const LLPackets<T> ll(block.target, args, block.rounds);
  const Flagged<F, T> flagged{block, ll, reinterpret_cast<const Element*>(args.in + part.begin),
                              reinterpret_cast<Element*>(args.out + part.begin),
                              part.size() / sizeof(Element)};
  const std::size_t packets = flagged.packets();
  const auto lane = static_cast<std::size_t>(block.target.lane());
  const auto lanes = static_cast<std::size_t>(block.target.lanes());
  const Items<Element> mine_first = flagged.own(lane);
  if (!block.rounds.may_begin()) return;
  if (lane < packets) flagged.send(lane, mine_first);
  for (std::size_t i = lane + lanes; i < packets; i += lanes) flagged.send(i, flagged.own(i));
  block.target.count(part.size(), 1 + 2 * (args.size - 1), 1 + 4 * (args.size - 1));
  Items<Element> sum{};
  const auto take_first = [&] { return lane >= packets || flagged.add_up(lane, mine_first, sum); };
  if (!block.rounds.turn_by_packets(take_first)) return;
  if (lane < packets) flagged.store(lane, sum);
  bool well = true;
  for (std::size_t i = lane + lanes; i < packets && well; i += lanes) {
    well = flagged.add_up(i, flagged.own(i), sum);
    if (well) flagged.store(i, sum);
  }
  block.rounds.close_packets(well);
}

}  // namespace dreamcomm::gpu::rows

#include "c10d/device/bootstrap_exchange.h"

#include <cstring>
#include <vector>

#include "comm/p2p/completion.h"

namespace dreamcomm {
namespace {

/// The tag of these messages. Users' tags have 31 bits.
constexpr std::uint64_t kTag = std::uint64_t{1} << 40;

template <typename Run>
gpu::Exchange exchange_by(int size, LongestWait longest, Run run) {
  return [size, longest, run](std::span<const std::byte> mine, std::span<std::byte> all) {
    const Block in{const_cast<std::byte*>(mine.data()), mine.size()};
    std::vector<Block> out;
    for (int rank = 0; rank < size; ++rank) {
      out.push_back({all.data() + static_cast<std::size_t>(rank) * mine.size(), mine.size()});
    }
    Request request;
    request.kind = Kind::kAllGather;
    request.in = std::span(&in, 1);
    request.out = out;
    request.deadline = deadline_in(Clock::now(), longest());
    run(request);
  };
}

}  // namespace

gpu::Exchange exchange_among_all(GroupCommunicator& group, const LongestWait& longest,
                                 const Interrupt& interrupt) {
  return exchange_by(group.size(), longest, [&group, interrupt](const Request& request) {
    group.run(request, interrupt);
  });
}

gpu::Exchange exchange_with(Communicator& comm, int peer, int first, const LongestWait& longest,
                            const Interrupt& interrupt) {
  const bool is_first = comm.rank() == first;
  return [&comm, peer, is_first, longest, interrupt](std::span<const std::byte> mine,
                                                     std::span<std::byte> all) {
    const std::size_t bytes = mine.size();
    // Lives until both messages are done, also if an interrupt ends the wait before.
    const auto both = std::make_shared<std::vector<std::byte>>(2 * bytes);
    std::byte* const own = both->data() + (is_first ? 0 : bytes);
    std::byte* const other = both->data() + (is_first ? bytes : 0);
    std::memcpy(own, mine.data(), bytes);
    const Clock::time_point deadline = deadline_in(Clock::now(), longest());
    const auto sent = comm.send(Block{own, bytes}, peer, kTag, deadline);
    sent->then([both](const std::exception_ptr&) {});
    const auto received = comm.receive(Block{other, bytes}, peer, kTag, deadline);
    received->then([both](const std::exception_ptr&) {});
    comm.wait(*received, interrupt);
    comm.wait(*sent, interrupt);
    std::memcpy(all.data(), both->data(), 2 * bytes);
  };
}

}  // namespace dreamcomm

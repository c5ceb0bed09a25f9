// Headers of all peers through one receive: order, cancellation, interrupts, lost peers.
#include "c10d/messages/header_channel.h"

#include <doctest.h>

#include <random>
#include <thread>

#include "cpp/c10d/messages/carrier.h"
#include "cpp/support/expected_errors.h"

namespace dreamcomm::testing {
namespace {

constexpr int kTag = 5;
constexpr std::chrono::milliseconds kNow{0};
constexpr std::chrono::milliseconds kLong{60'000};

void no_interrupt() {}

HeaderChannel channel_of(Communicator& comm) { return {std::make_shared<CommCarrier>(comm), kTag}; }

KeyedHeader numbered(int number) {
  KeyedHeader header;
  header.key[0] = number;
  header.description = std::string(static_cast<std::size_t>(number % 50), 'd');
  header.size = static_cast<std::uint32_t>(header.description.size());
  header.offsets = {number, -1};
  return header;
}

void require_numbered(const KeyedHeader& header, int number) {
  require(header.key[0] == number,
          concat("expected header ", number, ", got header ", header.key[0]));
  const KeyedHeader expected = numbered(number);
  require(header.description == expected.description && header.offsets == expected.offsets,
          "a header's description or offsets have changed");
}

/// Takes `count` headers of each peer. Now and then it does not wait, waits for a short time,
/// or cancels the receive.
void take_all(HeaderChannel& channel, Communicator& comm, int count) {
  std::mt19937 random(7);
  std::vector<int> seen(static_cast<std::size_t>(comm.size()));
  for (int left = count * (comm.size() - 1); left > 0;) {
    const std::chrono::milliseconds timeout(random() % 3 == 0 ? 1 : 0);
    const auto found = channel.next(timeout, no_interrupt);
    if (random() % 4 == 0) channel.cancel();
    if (!found) continue;
    require_numbered(found->second, seen[static_cast<std::size_t>(found->first)]++);
    --left;
  }
}

TEST_CASE("headers arrive once, and in their sender's order, whatever is cancelled") {
  constexpr int kHeaders = 200;
  for (const int size : {2, 3, 4}) {
    on_each_transport(size, [](Communicator& comm) {
      HeaderChannel channel = channel_of(comm);
      if (comm.rank() == 0) return take_all(channel, comm, kHeaders);
      for (int n = 0; n < kHeaders; ++n) {
        channel.send(0, numbered(n));
        pause(20);
      }
      while (channel.pending() > 0) std::this_thread::yield();
    });
  }
}

TEST_CASE("a header that arrives before the cancellation stays") {
  on_each_transport(2, [](Communicator& comm) {
    HeaderChannel channel = channel_of(comm);
    const int peer = 1 - comm.rank();
    require(!channel.next(kNow, no_interrupt), "a header before any was sent");
    comm.monitored_barrier(kLong, false, {}, 0);
    channel.send(peer, numbered(1));
    comm.monitored_barrier(kLong, false, {}, 0);
    channel.cancel();
    const auto found = channel.next(kLong, no_interrupt);
    require(found.has_value(), "the header is lost");
    require_numbered(found->second, 1);
    channel.cancel();
    require(!channel.next(kNow, no_interrupt), "a header arrived twice");
    comm.monitored_barrier(kLong, false, {}, 0);
  });
}

TEST_CASE("an interrupted wait loses no header") {
  on_each_transport(2, [](Communicator& comm) {
    HeaderChannel channel = channel_of(comm);
    if (comm.rank() == 1) {
      comm.monitored_barrier(kLong, false, {}, 0);
      return channel.send(0, numbered(3));
    }
    struct CtrlC {};
    bool is_interrupted = false;
    try {
      channel.next(kLong, [] { throw CtrlC(); });
    } catch (const CtrlC&) {
      is_interrupted = true;
    }
    require(is_interrupted, "the wait has ended without the interrupt's exception");
    comm.monitored_barrier(kLong, false, {}, 0);
    const auto found = channel.next(kLong, no_interrupt);
    require(found.has_value(), "no header");
    require_numbered(found->second, 3);
  });
}

TEST_CASE("a wait for a header ends when the peer has left") {
  on_each_transport(2, [](Communicator& comm) {
    if (comm.rank() == 1) return;
    HeaderChannel channel = channel_of(comm);
    expect(caught([&] {
             while (!channel.next(kLong, no_interrupt)) {
             }
           }),
           ErrorKind::kPeerLost, {"rank 1"});
  });
}

TEST_CASE("a channel that goes away leaves the tag to the next one") {
  on_each_transport(2, [](Communicator& comm) {
    const int peer = 1 - comm.rank();
    {
      require(!channel_of(comm).next(kNow, no_interrupt), "a header before any was sent");
    }
    comm.monitored_barrier(kLong, false, {}, 0);
    HeaderChannel channel = channel_of(comm);
    channel.send(peer, numbered(8));
    const auto found = channel.next(kLong, no_interrupt);
    require(found.has_value(), "no header");
    require_numbered(found->second, 8);
    comm.monitored_barrier(kLong, false, {}, 0);
  });
}

}  // namespace
}  // namespace dreamcomm::testing

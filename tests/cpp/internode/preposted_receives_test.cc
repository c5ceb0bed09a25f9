// The first messages of calls between hosts: from the second call on, their receives are posted
// ahead.
#include "internode/collectives/preposted_receives.h"

#include <doctest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "cpp/support/local_link.h"

namespace dreamcomm {
namespace {

using testing::make_local_links;

Cargo cargo_of(int value) {
  auto memory = std::make_shared<std::byte>(static_cast<std::byte>(value));
  return {std::move(memory), 0, 1};
}

struct Leader {
  Link& link;
  int peer;
  PrepostedReceives envelopes{};

  /// What the peer sends as a call opens, and what this leader has sent it.
  struct Opening {
    PrepostedReceives::Expected from_peer;
    std::shared_ptr<Parcel> sent;
  };
  Opening open(int value) {
    Opening opening;
    opening.from_peer = envelopes.from(peer, [this](std::uint32_t tag) {
      const Cargo room = cargo_of(0);
      return PrepostedReceives::Expected{room, link.receive(peer, room, tag)};
    });
    opening.sent = link.send(peer, cargo_of(value), envelopes.tag());
    envelopes.opened();
    return opening;
  }
};

/// Whether the message has found its receive.
bool is_taken(Parcel& sent) {
  sent.interrupt();
  return sent.wait();
}

TEST_CASE("a call's first message finds its receive, which began with the call before") {
  const std::vector<std::unique_ptr<Link>> links = make_local_links(2, true);
  Leader one{*links[0], 1};
  Leader other{*links[1], 0};
  for (int call = 0; call < 5; ++call) {
    CAPTURE(call);
    const Leader::Opening first = one.open(2 * call);
    CHECK(is_taken(*first.sent) == (call > 0));
    const Leader::Opening second = other.open(2 * call + 1);
    CHECK(is_taken(*second.sent));
    CHECK(is_taken(*first.sent));
    CHECK(first.from_peer.parcel->wait());
    CHECK(second.from_peer.parcel->wait());
    CHECK(static_cast<int>(*first.from_peer.room.data()) == 2 * call + 1);
    CHECK(static_cast<int>(*second.from_peer.room.data()) == 2 * call);
  }
}

TEST_CASE("the receive for the next call is announced before a call's own message") {
  const std::vector<std::unique_ptr<Link>> links = make_local_links(2, true);
  Leader early{*links[0], 1};
  Leader late{*links[1], 0};
  early.open(1);  // the late leader need not have opened its call for this
  const Leader::Opening opening = late.open(2);
  CHECK(opening.from_peer.parcel
            ->wait());  // the early leader may leave now: nothing is written to it
  CHECK(is_taken(*links[1]->send(0, cargo_of(3), late.envelopes.tag())));
}

}  // namespace
}  // namespace dreamcomm

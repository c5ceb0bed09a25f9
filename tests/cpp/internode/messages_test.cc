// send and recv in multi-node groups: matching, order, sizes, any source, errors.
#include <doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/p2p/completion.h"
#include "cpp/support/calls.h"
#include "cpp/support/hosts.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

using std::chrono::milliseconds;

Clock::time_point in(milliseconds time) { return Clock::now() + time; }
Clock::time_point soon() { return in(std::chrono::seconds(60)); }

Cargo cargo_of(std::size_t bytes) {
  return {{new std::byte[bytes], std::default_delete<std::byte[]>()}, 0, bytes};
}

/// Bytes that identify their sender, and the message.
Cargo message(std::size_t bytes, int from, int number) {
  Cargo cargo = cargo_of(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    const auto value = i % 3 == 0 ? static_cast<std::size_t>(from)
                                  : static_cast<std::size_t>(number) + (i % 3 == 1 ? 0 : i / 256);
    cargo.data()[i] = static_cast<std::byte>(value);
  }
  return cargo;
}

/// Sent messages: they must live until they have arrived.
class Sent {
 public:
  const Cargo& operator()(std::size_t bytes, int from, int number) {
    return all_.emplace_back(message(bytes, from, number));
  }

 private:
  std::deque<Cargo> all_;
};

void require_message(const Cargo& got, int from, int number) {
  const Cargo expected = message(got.bytes, from, number);
  require(std::equal(got.data(), got.data() + got.bytes, expected.data()),
          concat("message ", number, " of rank ", from, " has other bytes"));
}

/// The text of the error that the message fails with.
std::string failure_of(Communicator& host, Completion& completion, ErrorKind kind) {
  try {
    host.wait(completion);
  } catch (const Error& error) {
    require(error.kind() == kind, concat("another kind of error: ", error.what()));
    return error.what();
  }
  throw std::runtime_error("expected an error");
}

void require_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    require(text.find(word) != std::string::npos, concat("no '", word, "' in: ", text));
  }
}

void barrier(Communicator& host, HierarchicalCommunicator& hier) {
  host.run_in_turn([&] { hier.run_ordered({}); });
}

/// Releases the ranks that wait for it, however its scope ends.
class AtEnd {
 public:
  explicit AtEnd(std::atomic<bool>& over) : over_(over) {}
  ~AtEnd() {
    over_ = true;
    over_.notify_all();
  }
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;

 private:
  std::atomic<bool>& over_;
};

constexpr std::size_t kSizes[] = {
    0, 1, 1000, MessageHeader::kInline, MessageHeader::kInline + 1, 100'000};

TEST_CASE("messages of all sizes arrive, between all ranks at once") {
  for (const Hosts& hosts : kPlaces) {
    run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
      Sent sent;
      const int size = size_of(hosts);
      for (const std::size_t bytes : kSizes) {
        std::vector<std::shared_ptr<Completion>> tickets;
        std::vector<Cargo> got;
        for (int peer = 0; peer < size; ++peer) {
          got.push_back(cargo_of(bytes));
          if (peer == rank) continue;
          tickets.push_back(hier.receive(got.back(), peer, 3, soon()));
          tickets.push_back(hier.send(sent(bytes, rank, peer), peer, 3, soon()));
        }
        for (const auto& completion : tickets) host.wait(*completion);
        for (int peer = 0; peer < size; ++peer) {
          if (peer != rank) require_message(got[static_cast<std::size_t>(peer)], peer, rank);
        }
      }
      barrier(host, hier);
    });
  }
}

/// Each rank sends every other kEach messages of mixed sizes under either tag.
TEST_CASE("messages arrive once, in order, by source and from any") {
  constexpr int kEach = 12;
  const auto bytes_of = [](int number) { return number % 3 == 0 ? 6000U : 8U * (1 + number); };
  for (const Hosts& hosts : kPlaces) {
    run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
      Sent sent;
      const int size = size_of(hosts);
      std::vector<std::shared_ptr<Completion>> tickets;
      const auto send_all = [&] {
        for (int number = 0; number < kEach; ++number) {
          for (int peer = 0; peer < size; ++peer) {
            if (peer == rank) continue;
            for (const std::uint64_t tag : {0U, 1U}) {
              const std::size_t bytes = tag == 0 ? bytes_of(number) : 5000;
              tickets.push_back(hier.send(sent(bytes, rank, number), peer, tag, soon()));
            }
          }
        }
      };
      std::vector<Cargo> named;
      std::vector<Cargo> any;
      std::vector<std::shared_ptr<Completion>> of_any;
      const auto receive_all = [&] {
        for (int number = 0; number < kEach; ++number) {
          for (int peer = 0; peer < size; ++peer) {
            if (peer == rank) continue;
            named.push_back(cargo_of(bytes_of(number)));
            tickets.push_back(hier.receive(named.back(), peer, 0, soon()));
            any.push_back(cargo_of(5000));
            of_any.push_back(hier.receive(any.back(), std::nullopt, 1, soon()));
          }
        }
      };
      // Some are announced before they are received, others after.
      if (rank % 2 == 0) {
        send_all();
        receive_all();
      } else {
        receive_all();
        send_all();
      }
      for (const auto& completion : tickets) host.wait(*completion);
      std::vector<int> next(static_cast<std::size_t>(size));
      for (std::size_t i = 0; i < any.size(); ++i) {
        host.wait(*of_any[i]);
        const int source = of_any[i]->source();
        require(source >= 0 && source < size && source != rank, "a message without a sender");
        require_message(any[i], source, next[static_cast<std::size_t>(source)]++);
      }
      std::size_t i = 0;
      for (int number = 0; number < kEach; ++number) {
        for (int peer = 0; peer < size; ++peer) {
          if (peer != rank) require_message(named[i++], peer, number);
        }
      }
      barrier(host, hier);
    });
  }
}

TEST_CASE("messages and collectives go on at once") {
  const Hosts hosts{{0, 1}, {2, 3}};
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    Sent sent;
    const int peer = 3 - rank;
    for (int number = 0; number < 20; ++number) {
      Cargo got = cargo_of(20'000);
      const auto in_completion = hier.receive(got, peer, 5, soon());
      barrier(host, hier);
      const auto out_completion = hier.send(sent(20'000, rank, number), peer, 5, soon());
      barrier(host, hier);
      host.wait(*in_completion);
      host.wait(*out_completion);
      require_message(got, peer, number);
    }
  });
}

TEST_CASE("a message of another size is refused on both ranks, and harms none after it") {
  const Hosts hosts{{0}, {1, 2}};
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    Sent sent;
    if (rank == 0) {
      const auto wrong = hier.send(sent(10'000, 0, 1), 2, 0, soon());
      const auto right = hier.send(sent(10'000, 0, 2), 2, 0, soon());
      require_words(failure_of(host, *wrong, ErrorKind::kMismatch),
                    {"send of 10000 bytes", "to rank 2 of host h1 (ranks 1, 2)", "rank 0 of 3",
                     "refused", "expects 5000 bytes"});
      host.wait(*right);
    }
    if (rank == 2) {
      Cargo little = cargo_of(5000);
      Cargo enough = cargo_of(10'000);
      const auto wrong = hier.receive(little, 0, 0, soon());
      const auto right = hier.receive(enough, 0, 0, soon());
      require_words(failure_of(host, *wrong, ErrorKind::kMismatch),
                    {"recv of 5000 bytes", "rank 0 of host h0 (rank 0) sent 10000"});
      host.wait(*right);
      require_message(enough, 0, 2);
    }
    barrier(host, hier);
  });
}

TEST_CASE("a late receive is withdrawn, from a rank and from any") {
  const Hosts hosts{{0, 1}, {2}};
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    Sent sent;
    for (const bool any : {false, true}) {
      const std::optional<int> source = any ? std::nullopt : std::optional(2);
      if (rank == 0) {
        Cargo room = cargo_of(100);
        const auto completion = hier.receive(room, source, 9, in(milliseconds(60)));
        require_words(
            failure_of(host, *completion, ErrorKind::kTimeout),
            {"reached its timeout", any ? "no rank has sent one" : "rank 2 has not sent it"});
      }
      barrier(host, hier);
      if (rank == 2) host.wait(*hier.send(sent(100, 2, 4), 0, 9, soon()));
      if (rank == 0) {
        Cargo room = cargo_of(100);
        const auto completion = hier.receive(room, source, 9, soon());
        host.wait(*completion);
        require(completion->source() == 2, "another source");
        require_message(room, 2, 4);
      }
      barrier(host, hier);
    }
  });
}

TEST_CASE("a message that is not received ends the group at its deadline") {
  const Hosts hosts{{0}, {1}};
  std::atomic<bool> over = false;
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    Sent sent;
    if (rank != 0) return over.wait(false);
    const AtEnd tell(over);
    const auto completion = hier.send(sent(100'000, 0, 0), 1, 0, in(milliseconds(80)));
    const std::string text = failure_of(host, *completion, ErrorKind::kTimeout);
    require_words(text, {"send of 100000 bytes with tag 0 to rank 1 of host h1", "not received"});
    while (!host.failure()) std::this_thread::yield();
    require_words(*host.failure(), {"rank 1 of host h1", "not received"});
  });
}

TEST_CASE("a lost rank is reported to ranks that wait for it, and harms no other") {
  const Hosts hosts{{0}, {1}, {2}};
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    Sent sent;
    if (rank == 1) return;  // its communicator ends
    if (rank == 2) {
      std::this_thread::sleep_for(milliseconds(30));
      host.wait(*hier.send(sent(9000, 2, 7), 0, 1, soon()));
      Cargo room = cargo_of(1);
      host.wait(*hier.receive(room, 0, 2, soon()));
      return;
    }
    Cargo room = cargo_of(9000);
    const auto any = hier.receive(room, std::nullopt, 1, soon());
    Cargo none = cargo_of(10);
    const auto lost = hier.receive(none, 1, 0, soon());
    require_words(failure_of(host, *lost, ErrorKind::kPeerLost),
                  {"recv of 10 bytes with tag 0 from rank 1 of host h1", "cannot finish"});
    const auto late = hier.send(sent(10, 0, 0), 1, 0, soon());
    require_words(failure_of(host, *late, ErrorKind::kPeerLost), {"to rank 1 of host h1"});
    host.wait(*any);
    require_message(room, 2, 7);
    host.wait(*hier.send(sent(1, 0, 0), 2, 2, soon()));
  });
}

TEST_CASE("a receive from any source fails when every other rank is lost") {
  const std::vector<Hosts> shapes{{{0}, {1}}, {{0, 1}, {2}}, {{0, 2}, {1}, {3}}};
  for (const Hosts& hosts : shapes) {
    run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
      Sent sent;
      std::this_thread::sleep_for(milliseconds(2 * rank));  // they leave one after another
      if (rank == 1) host.wait(*hier.send(sent(9000, 1, 7), 0, 1, soon()));
      if (rank != 0) return;  // its communicator ends
      Cargo room = cargo_of(9000);
      Cargo none = cargo_of(10);
      const auto some = hier.receive(room, std::nullopt, 1, soon());
      const auto lost = hier.receive(none, std::nullopt, 1, soon());
      const std::string text = failure_of(host, *lost, ErrorKind::kPeerLost);
      require_words(text, {"rank 0 of", "no other rank can send it: "});
      for (std::size_t near = 1; near < hosts[0].size(); ++near) {
        require_words(text, {concat("rank ", hosts[0][near], " has left the group")});
      }
      host.wait(*some);
      require_message(room, 1, 7);
      const auto late = hier.receive(none, std::nullopt, 1, soon());
      require_words(failure_of(host, *late, ErrorKind::kPeerLost), {"no other rank can send it"});
    });
  }
}

TEST_CASE("the group's end ends the messages under way") {
  const Hosts hosts{{0, 1}, {2, 3}};
  std::atomic<bool> over = false;
  run_hosts(hosts, [&](Communicator& host, HierarchicalCommunicator& hier, int rank) {
    if (rank != 0) return over.wait(false);
    const AtEnd tell(over);
    Cargo room = cargo_of(6000);
    const auto named = hier.receive(room, 3, 0, soon());
    Cargo other = cargo_of(6000);
    const auto any = hier.receive(other, std::nullopt, 1, soon());
    hier.abort("a test wants it");
    for (const auto& completion : {named, any}) {
      require_words(failure_of(host, *completion, ErrorKind::kAborted), {"a test wants it"});
    }
  });
}

}  // namespace
}  // namespace dreamcomm::testing

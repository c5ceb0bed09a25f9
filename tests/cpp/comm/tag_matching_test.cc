// A tag matcher that many threads progress at once.
#include "comm/p2p/tag_matching.h"

#include <doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "cpp/support/calls.h"
#include "transport/local_fabric.h"

namespace dreamcomm::testing {
namespace {

constexpr std::size_t kBytes = std::size_t{4} << 20;  // one buffer: its copy outlasts many looks
#if defined(__SANITIZE_THREAD__)
constexpr int kTurns = 10;  // each takes a second, and a race is found whoever comes first
#else
constexpr int kTurns = 50;
#endif

struct Rank {
  explicit Rank(std::unique_ptr<Fabric> f)
      : fabric(std::move(f)), member(*fabric, "default"), matcher(member, recorder) {}
  std::unique_ptr<Fabric> fabric;
  RankState member;
  Recorder recorder{{}};
  TagMatcher matcher;
};

Bytes message(int number) { return make_block(DType::kUInt8, kBytes, 1, 0, number); }

TEST_CASE("what a rank had sent in full when it left arrives, whichever thread progresses it") {
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(60);
  for (int turn = 0; turn < kTurns; ++turn) {
    auto fabrics = make_local(2, {std::size_t{64} << 10, kBytes, 0, {}});
    Rank sender(std::move(fabrics[0]));
    Rank receiver(std::move(fabrics[1]));
    std::array<Bytes, 2> sent{message(0), message(1)};
    std::array<Bytes, 2> got{Bytes(kBytes), Bytes(kBytes)};
    std::vector<std::shared_ptr<Completion>> sends;
    std::vector<std::shared_ptr<Completion>> receives;
    for (std::size_t i = 0; i < sent.size(); ++i) {
      sends.push_back(sender.matcher.send({sent[i].data(), kBytes}, 1, i, deadline));
    }
    for (std::size_t i = 0; i < got.size(); ++i) {
      receives.push_back(receiver.matcher.receive({got[i].data(), kBytes}, 0, i, deadline));
    }
    receiver.matcher.progress();  // it grants both, and the sender fills both buffers
    for (const auto& completion : sends) {
      while (!completion->done()) sender.matcher.progress();
    }
    sender.member.leave();

    std::vector<std::thread> threads;
    std::atomic<int> ready = 0;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        ready.fetch_add(1);
        while (ready.load() < 3) std::this_thread::yield();
        while (!receives[0]->done() || !receives[1]->done()) receiver.matcher.check_health();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 0; i < got.size(); ++i) {
      CAPTURE(turn);
      CAPTURE(i);
      REQUIRE(receives[i]->failure() == nullptr);
      REQUIRE(got[i] == sent[i]);
    }
  }
}

}  // namespace
}  // namespace dreamcomm::testing

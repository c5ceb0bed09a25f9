// Questions and answers between processes, here the two ends of socket pairs in one.
#include "transport/introspect/call_site_query.h"

#include <doctest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace dreamcomm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// For waits that must be ended: one that is not hangs.
constexpr std::chrono::hours kForEver(24 * 365);

std::pair<Fd, Fd> make_pair() {
  std::array<int, 2> ends{};
  REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) == 0);
  return {Fd(ends[0]), Fd(ends[1])};
}

/// Two processes and their connection.
struct Two {
  explicit Two(CallSiteService::Tell second) : two(CallSiteService::make(std::move(second))) {
    auto [left, right] = make_pair();
    here = std::move(left);
    there = std::move(right);
    lines = {one->listen(here), two->listen(there)};
  }
  std::string ask(milliseconds patience = seconds(60)) { return one->ask(here, patience); }

  std::shared_ptr<CallSiteService> one =
      CallSiteService::make([] { return std::string(" at one.py:1"); });
  std::shared_ptr<CallSiteService> two;
  Fd here, there;
  std::array<std::shared_ptr<void>, 2> lines;
};

/// Closed until it is opened.
class Gate {
 public:
  void open() {
    const std::scoped_lock lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

TEST_CASE("a process reports its call site to a peer, and to itself") {
  Two both([] { return std::string(" at two.py:2"); });
  for (int i = 0; i < 3; ++i) CHECK(both.ask() == " at two.py:2");
  CHECK(both.two->ask(both.there, seconds(60)) == " at one.py:1");
  CHECK(both.one->own(seconds(60)) == " at one.py:1");
}

TEST_CASE("a long answer is cut") {
  const std::string text(10'000, 'x');
  Two both([&] { return text; });
  const std::string told = both.ask();
  CHECK(told.size() > 400);
  CHECK(told == text.substr(0, told.size()));
}

TEST_CASE("a peer that does not answer is not waited for again until it does") {
  Gate gate;
  Two both([&] {
    gate.pass();
    return std::string(" at last");
  });
  CHECK(both.ask(milliseconds(1)).empty());
  CHECK(both.ask(kForEver).empty());  // or this would last
  gate.open();
  while (both.ask().empty()) std::this_thread::yield();  // the first answer is on its way
  CHECK(both.ask() == " at last");
}

TEST_CASE("several threads wait for one answer, and all get it") {
  Gate gate;
  std::atomic<int> calls = 0;
  Two both([&] {
    gate.pass();
    ++calls;
    return std::string(" at two.py:2");
  });
  std::vector<std::thread> askers;
  std::atomic<int> told = 0;
  both.one->inquire(both.here);
  for (int i = 0; i < 4; ++i) {
    askers.emplace_back([&] { told += both.ask(kForEver) == " at two.py:2" ? 1 : 0; });
  }
  gate.open();
  for (std::thread& asker : askers) asker.join();
  CHECK(told == 4);
}

TEST_CASE("an answer that was requested ahead and not fetched is not used much later") {
  std::atomic<int> calls = 0;
  const auto one =
      CallSiteService::make([] { return std::string(" at one.py:1"); }, milliseconds(0));
  const auto two = CallSiteService::make([&] { return " at two.py:" + std::to_string(++calls); });
  const auto [here, there] = make_pair();
  const std::array lines{one->listen(here), two->listen(there)};
  one->inquire(here);
  while (calls == 0) std::this_thread::yield();
  // The second of these comes after the answer, on the same way.
  for (int i = 0; i < 2; ++i) CHECK(two->ask(there, kForEver) == " at one.py:1");
  CHECK(one->ask(here, kForEver) == " at two.py:2");
}

TEST_CASE("a peer that has ended, or hung up, causes no error") {
  Two both([] { return std::string(" at two.py:2"); });
  both.two->stop();
  CHECK(both.ask(milliseconds(1)).empty());
  both.lines[1].reset();
  both.there = Fd();
  CHECK(both.ask(milliseconds(1)).empty());
  Two others([] { return std::string(" at two.py:2"); });
  others.lines[1].reset();
  others.there = Fd();
  CHECK(others.ask(milliseconds(1)).empty());
  CHECK(others.one->own(seconds(60)) == " at one.py:1");
}

TEST_CASE("packets of another size are ignored") {
  Two both([] { return std::string(" at two.py:2"); });
  for (const std::string& noise : {std::string("?"), std::string(5000, 'z'), std::string(512, 7)}) {
    REQUIRE(send(both.here.get(), noise.data(), noise.size(), MSG_NOSIGNAL) > 0);
  }
  CHECK(both.ask() == " at two.py:2");
}

TEST_CASE("stopping releases waiting threads, and ends their questions") {
  Gate gate;
  Two both([&] {
    gate.pass();
    return std::string("late");
  });
  std::thread asker([&] { CHECK(both.ask(kForEver).empty()); });
  std::thread owner([&] { CHECK(both.two->own(kForEver).empty()); });
  both.one->stop();
  std::thread stopper([&] { both.two->stop(); });
  asker.join();
  owner.join();
  gate.open();
  stopper.join();
  both.two->stop();
  CHECK(both.two->own(milliseconds(1)).empty());
}

TEST_CASE("the thread that answers may drop the last holder") {
  const auto [here, there] = make_pair();
  const auto asker = CallSiteService::make([] { return std::string(); });
  std::shared_ptr<CallSiteService> held;
  held = CallSiteService::make([&] {
    held.reset();
    return std::string(" at the end");
  });
  const std::array lines{asker->listen(here), held->listen(there)};
  CHECK(asker->ask(here, seconds(60)) == " at the end");
  CHECK(asker->ask(here, milliseconds(1)).empty());
}

int open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

/// Sends what a peer may send: with a descriptor, if `fd` is one.
void send_noise(const Fd& socket, const std::string& noise, int fd) {
  iovec bytes{const_cast<char*>(noise.data()), noise.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof fd)> control{};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    *CMSG_FIRSTHDR(&message) = {CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
    std::memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), &fd, sizeof fd);
  }
  REQUIRE(sendmsg(socket.get(), &message, MSG_NOSIGNAL) > 0);
}

TEST_CASE("thousands of garbage packets do no harm") {
  constexpr std::size_t kPacket = 512;
  Two both([] { return std::string(" at two.py:2"); });
  CHECK(both.ask() == " at two.py:2");
  const int before = open_descriptors();
  std::mt19937 chance(1);
  for (int i = 0; i < 3000; ++i) {
    const std::array sizes{kPacket, kPacket, kPacket - 1, kPacket + 1, std::size_t{1}};
    std::string noise(sizes[chance() % sizes.size()], '\0');
    for (char& byte : noise) byte = static_cast<char>(chance());
    if (noise.size() >= 4 && chance() % 2 == 0) {  // a question or an answer, of any number
      const std::uint32_t sort = 1 + chance() % 2;
      std::memcpy(noise.data(), &sort, sizeof sort);
    }
    send_noise(both.here, noise, chance() % 4 == 0 ? both.there.get() : -1);
  }
  CHECK(both.ask() == " at two.py:2");
  CHECK(both.two->ask(both.there, seconds(60)) == " at one.py:1");
  CHECK(open_descriptors() == before);
}

TEST_CASE("nothing stays open if only a weak pointer is left") {
  const int before = open_descriptors();
  auto one = CallSiteService::make([] { return std::string(); });
  const std::weak_ptr<CallSiteService> weak = one;
  CHECK(open_descriptors() > before);
  one.reset();
  CHECK(weak.expired());
  CHECK(open_descriptors() == before);
}

TEST_CASE("several peers are asked at once, and then waited for") {
  const auto asker = CallSiteService::make([] { return std::string(); });
  const auto other = CallSiteService::make([] { return std::string(" there"); });
  std::vector<std::pair<Fd, Fd>> pairs;
  std::vector<std::shared_ptr<void>> lines;
  for (int i = 0; i < 5; ++i) {
    pairs.push_back(make_pair());
    lines.push_back(asker->listen(pairs.back().first));
    lines.push_back(other->listen(pairs.back().second));
    asker->inquire(pairs.back().first);
  }
  for (const auto& pair : pairs) CHECK(asker->ask(pair.first, seconds(60)) == " there");
}

TEST_CASE("sockets are added and removed while others ask") {
  const auto one = CallSiteService::make([] { return std::string(" here"); });
  const auto two = CallSiteService::make([] { return std::string(" there"); });
  std::atomic<int> answered = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        auto [left, right] = make_pair();
        const std::array lines{one->listen(left), two->listen(right)};
        answered += one->ask(left, seconds(60)) == " there" ? 1 : 0;
        answered += two->ask(right, seconds(60)) == " here" ? 1 : 0;
        if (i % 7 == 0) one->ask(left, milliseconds(0));  // the answer finds a closed socket
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(answered == 400);
}

}  // namespace
}  // namespace dreamcomm

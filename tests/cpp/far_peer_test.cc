// What is heard of a rank of another host that has left.
#include <doctest.h>

#include <cstring>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "core/error.h"
#include "internode/p2p/peer_channel.h"

namespace dreamcomm {
namespace {

class Come final : public Parcel {
 public:
  bool wait() override { return true; }
  void interrupt() override {}
};

/// To a rank that has left a letter behind: nothing goes over its connections any more.
class LeftBehind final : public Link {
 public:
  explicit LeftBehind(const MessageHeader& header) : letter_(header) {}
  std::shared_ptr<Parcel> send(int, const Cargo&, std::uint32_t) override { fail(); }
  std::shared_ptr<Parcel> receive(int, const Cargo& cargo, std::uint32_t) override {
    if (std::exchange(read_, true)) fail();
    std::memcpy(cargo.data(), &letter_, sizeof letter_);
    return std::make_shared<Come>();
  }
  void close() override {}
  std::string describe() const override { return "what is left"; }

 private:
  [[noreturn]] static void fail() { throw Error(ErrorKind::kPeerLost, "it has left"); }

  const MessageHeader letter_;
  bool read_ = false;
};

TEST_CASE("a letter of a rank that has left since is heard before that is told") {
  LeftBehind link({.number = 7, .tag = 3});
  bool heard = false;
  std::promise<std::pair<bool, std::string>> lost;
  PeerChannel peer(link, 1,
                   {[&](const MessageHeader& header, std::span<const std::byte>) {
                      heard = header.number == 7 && header.tag == 3;
                    },
                    [&](const std::string& why) { lost.set_value({heard, why}); }});
  const auto [before, why] = lost.get_future().get();
  CHECK(before);
  CHECK(why == "it has left");
}

}  // namespace
}  // namespace dreamcomm

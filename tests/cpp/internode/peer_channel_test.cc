// What arrives from a rank of another host that has left.
#include "internode/p2p/peer_channel.h"

#include <doctest.h>

#include <cstring>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "core/error.h"

namespace dreamcomm {
namespace {

class ArrivedParcel final : public Parcel {
 public:
  bool wait() override { return true; }
  void interrupt() override {}
};

/// A link to a rank that has left after sending a header: its connections carry nothing more.
class LeftBehind final : public Link {
 public:
  explicit LeftBehind(const MessageHeader& header) : header_(header) {}
  std::shared_ptr<Parcel> send(int, const Cargo&, std::uint32_t) override { fail(); }
  std::shared_ptr<Parcel> receive(int, const Cargo& cargo, std::uint32_t) override {
    if (std::exchange(read_, true)) fail();
    std::memcpy(cargo.data(), &header_, sizeof header_);
    return std::make_shared<ArrivedParcel>();
  }
  void close() override {}
  std::string describe() const override { return "what is left"; }

 private:
  [[noreturn]] static void fail() { throw Error(ErrorKind::kPeerLost, "it has left"); }

  const MessageHeader header_;
  bool read_ = false;
};

TEST_CASE("a header of a rank that has left since is handled before the loss is reported") {
  LeftBehind link({.number = 7, .tag = 3});
  bool handled = false;
  std::promise<std::pair<bool, std::string>> lost;
  PeerChannel peer(link, 1,
                   {[&](const MessageHeader& header, std::span<const std::byte>) {
                      handled = header.number == 7 && header.tag == 3;
                    },
                    [&](const std::string& why) { lost.set_value({handled, why}); }});
  const auto [before, why] = lost.get_future().get();
  CHECK(before);
  CHECK(why == "it has left");
}

}  // namespace
}  // namespace dreamcomm

// Headers and placed tensors between the backends of a group.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <doctest.h>

#include "c10d/messages/header_channel.h"
#include "cpp/c10d/support/group_ranks.h"
#include "cpp/support/ranks.h"

namespace dreamcomm::testing {
namespace {

constexpr int kTag = 77;

void no_interrupt() {}

HeaderChannel channel_of(const GroupRank& self) {
  std::shared_ptr<MessageCarrier> carrier(self.backend.get(),
                                          [backend = self.backend](MessageCarrier*) {});
  return {std::move(carrier), kTag};
}

TEST_CASE("a tensor is announced by a header and copied out of its sender's heap") {
  for (const int size : {2, 3}) {
    CAPTURE(size);
    CHECK_NOTHROW(run_group({.size = size}, [](GroupRank& self) {
      HeaderChannel channel = channel_of(self);
      std::vector<std::unique_ptr<PlacedMessage>> placed;
      for (int peer = 0; peer < self.size; ++peer) {
        if (peer == self.rank) continue;
        placed.push_back(self.backend->place(at::full({6}, 10 * self.rank + peer, at::kLong)));
        require(placed.back() != nullptr, "the tensor is not placed");
        KeyedHeader header;
        header.offsets = {placed.back()->offset()};
        channel.send(peer, header);
      }
      for (int left = self.size - 1; left > 0; --left) {
        const auto found = channel.next(std::chrono::seconds(30), no_interrupt);
        require(found.has_value(), "no header");
        const int source = found->first;
        const at::Tensor got =
            self.backend->take_placed(source, found->second.offsets[0], {2, 3}, at::kLong);
        require(got.eq(10 * source + self.rank).all().item<bool>(), "other elements");
      }
      self.backend->barrier({})->wait();
      for (const auto& one : placed) require(one->taken(), "a tensor is not marked as taken");
    }));
  }
}

TEST_CASE("places outside of a heap are refused") {
  CHECK_NOTHROW(run_group({.size = 2}, [](GroupRank& self) {
    for (const std::int64_t offset : {std::int64_t{-1}, std::int64_t{1} << 60}) {
      CHECK_THROWS_AS(self.backend->take_placed(1 - self.rank, offset, {10}, at::kFloat),
                      c10::ValueError);
    }
    self.backend->barrier({})->wait();
  }));
}

}  // namespace
}  // namespace dreamcomm::testing

// Tensors in their sender's heap: read after they are written, reused after they are taken.
#include "c10d/messages/placed_message.h"

#include <doctest.h>

#include <deque>
#include <set>

#include "c10d/messages/header_channel.h"
#include "cpp/c10d/messages/carrier.h"
#include "cpp/support/expected_errors.h"

namespace dreamcomm::testing {
namespace {

constexpr int kTag = 5;
constexpr std::size_t kHeap = std::size_t{1} << 20;

Bytes bytes_of(int number) {
  return Bytes(static_cast<std::size_t>(1000 + number % 7), static_cast<std::byte>(number));
}

void in_heaps(int size, const std::function<void(Communicator&)>& body) {
  for (const Transport transport : transports()) {
    const Setup setup{
        .transport = transport, .size = size, .page_bytes = tiny_page(size), .heap_bytes = kHeap};
    CAPTURE(setup);
    CHECK_NOTHROW(run_ranks(setup, body));
  }
}

/// Places each message and announces it. Keeps at most `most` that are not taken.
void place_all(Communicator& comm, HeaderChannel& channel, int count, std::size_t most) {
  std::deque<std::unique_ptr<PlacedMessage>> placed;
  std::set<std::int64_t> offsets;
  for (int n = 0; n < count; ++n) {
    while (placed.size() == most) {
      if (placed.front()->taken()) placed.pop_front();
    }
    placed.push_back(PlacedMessage::copy_of(bytes_of(n), own_heap()->shared_from_this()));
    require(placed.back() != nullptr, "the heap is full");
    offsets.insert(placed.back()->offset());
    KeyedHeader header;
    header.key[0] = n;
    header.offsets = {placed.back()->offset()};
    channel.send((n % (comm.size() - 1)) + 1, header);
  }
  require(offsets.size() <= most + 1, "memory that was taken is not used again");
  while (!placed.empty()) {
    if (placed.front()->taken()) placed.pop_front();
  }
}

TEST_CASE("placed messages are whole, and their memory is used again") {
  constexpr int kMessages = 600;
  for (const int size : {2, 3}) {
    in_heaps(size, [](Communicator& comm) {
      HeaderChannel channel(std::make_shared<CommCarrier>(comm), kTag);
      if (comm.rank() == 0) return place_all(comm, channel, kMessages, 4);
      for (int left = kMessages / (comm.size() - 1); left > 0; --left) {
        const auto found = channel.next(std::chrono::minutes(1), [] {});
        require(found.has_value(), "no header");
        const Bytes expected = bytes_of(static_cast<int>(found->second.key[0]));
        Bytes got(expected.size());
        PlacedMessage::take(comm.heap(0).data() + found->second.offsets[0], got.size(), got.data());
        require(got == expected, "a message has other bytes");
        pause(10);
      }
    });
  }
}

TEST_CASE("memory of a copy that is dropped before it is taken is not used again") {
  const std::shared_ptr<Heap> heap = Heap::make(kHeap);
  auto dropped = PlacedMessage::copy_of(bytes_of(1), heap);
  const std::int64_t offset = dropped->offset();
  auto taken = PlacedMessage::copy_of(bytes_of(2), heap);
  const std::int64_t reusable = taken->offset();
  Bytes got(taken->bytes());
  PlacedMessage::take(heap->data() + reusable, got.size(), got.data());
  CHECK(got == bytes_of(2));
  CHECK(taken->taken());
  CHECK_FALSE(dropped->taken());
  dropped.reset();
  taken.reset();
  std::set<std::int64_t> offsets;
  std::vector<std::unique_ptr<PlacedMessage>> all;
  while (auto next = PlacedMessage::copy_of(bytes_of(3), heap)) {
    offsets.insert(next->offset());
    all.push_back(std::move(next));
  }
  CHECK(all.size() > 100);
  CHECK(offsets.contains(reusable));
  CHECK_FALSE(offsets.contains(offset));
}

TEST_CASE("a message of no bytes is placed and taken") {
  const std::shared_ptr<Heap> heap = Heap::make(kHeap);
  const auto placed = PlacedMessage::copy_of({}, heap);
  REQUIRE(placed != nullptr);
  PlacedMessage::take(heap->data() + placed->offset(), 0, nullptr);
  CHECK(placed->taken());
}

TEST_CASE("a flag lies behind the bytes, aligned") {
  for (const std::size_t bytes : {0, 1, 3, 4, 5, 128}) {
    CAPTURE(bytes);
    const std::size_t space = PlacedMessage::space_for(bytes);
    CHECK(space >= bytes + sizeof(PlacedMessage::Flag));
    CHECK(space % alignof(PlacedMessage::Flag) == 0);
    CHECK(space < bytes + 2 * sizeof(PlacedMessage::Flag));
  }
}

}  // namespace
}  // namespace dreamcomm::testing

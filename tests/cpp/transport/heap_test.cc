// The heap: allocation, reuse and refusal.
#include "transport/shm/heap.h"

#include <doctest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/error.h"

namespace dreamcomm::testing {
namespace {

TEST_CASE("heap: memory is aligned, apart, and comes back") {
  const auto heap = Heap::make(1 << 20);
  std::vector<std::shared_ptr<std::byte>> held;
  std::mt19937 random(3);
  for (int i = 0; i < 3000; ++i) {
    if (random() % 2 == 0 || held.empty()) {
      const std::size_t bytes = random() % 5000;
      auto memory = heap->allocate(bytes);
      if (!memory) continue;
      CHECK(reinterpret_cast<std::uintptr_t>(memory.get()) % Heap::kAlign == 0);
      std::memset(memory.get(), i, bytes);
      held.push_back(std::move(memory));
    } else {
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
    }
  }
  held.clear();
  CHECK(heap->bytes_in_use() == 0);
  // All ranges have grown together again: the whole can be had.
  CHECK(heap->allocate(1 << 20) != nullptr);
}

TEST_CASE("heap: two owners never hold the same bytes") {
  const auto heap = Heap::make(1 << 18);
  const auto a = heap->allocate(1000);
  auto b = heap->allocate(1000);
  const auto c = heap->allocate(1000);
  std::memset(a.get(), 1, 1000);
  std::memset(c.get(), 3, 1000);
  b = nullptr;
  const auto again = heap->allocate(1024);
  std::memset(again.get(), 9, 1024);
  CHECK(a.get()[999] == std::byte{1});
  CHECK(c.get()[0] == std::byte{3});
}

TEST_CASE("heap: retired memory is not reused, and does not keep the heap alive") {
  std::weak_ptr<Heap> seen;
  {
    const auto heap = Heap::make(4096);
    seen = heap;
    auto first = heap->allocate(1024);
    auto retired = heap->allocate(1024);
    std::byte* const place = retired.get();
    heap->retire(place + 100);
    heap->retire(place + 200);
    heap->retire(heap->data() + 4096);  // not of the heap
    CHECK(heap->bytes_in_use() == 2048);
    retired = nullptr;
    first = nullptr;
    CHECK(heap->bytes_in_use() == 1024);
    std::vector<std::shared_ptr<std::byte>> all;
    while (auto one = heap->allocate(512)) all.push_back(one);
    CHECK(all.size() == 6);
    for (const auto& one : all) CHECK((one.get() < place || one.get() >= place + 1024));
  }
  CHECK(seen.expired());
}

TEST_CASE("heap: when it is full it gives nothing, and gives room again afterwards") {
  const auto heap = Heap::make(8192);
  auto all = heap->allocate(8192);
  CHECK(all != nullptr);
  CHECK(heap->allocate(1) == nullptr);
  all = nullptr;
  CHECK(heap->allocate(0) != nullptr);
  CHECK(heap->allocate(9000) == nullptr);
  CHECK_THROWS_AS(Heap::make(0), Error);
}

TEST_CASE("heap: memory outlives the last other owner of its heap") {
  auto heap = Heap::make(1 << 16);
  const auto memory = heap->allocate(100);
  heap = nullptr;
  std::memset(memory.get(), 7, 100);
  CHECK(memory.get()[99] == std::byte{7});
}

TEST_CASE("heap: a peer's is mapped once and shows the same bytes") {
  const auto heap = Heap::make(1 << 16);
  const auto other = Heap::make(1 << 17);
  const auto memory = other->allocate(64);
  memory.get()[5] = std::byte{42};
  const auto mapping = heap->map_peer(other->id(), other->fd(), other->bytes());
  CHECK(mapping == heap->map_peer(other->id(), other->fd(), other->bytes()));
  CHECK(mapping->data() != other->data());
  CHECK(mapping->data()[memory.get() - other->data() + 5] == std::byte{42});
}

TEST_CASE("heap: threads allocate side by side") {
  const auto heap = Heap::make(1 << 20);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        const auto memory = heap->allocate(static_cast<std::size_t>(100 + i));
        if (memory) std::memset(memory.get(), t, static_cast<std::size_t>(100 + i));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(heap->bytes_in_use() == 0);
}

}  // namespace
}  // namespace dreamcomm::testing

// The path of a small call: nothing on it allocates.
#include <doctest.h>

#include <array>
#include <cstdlib>
#include <new>

#include "cpp/support/calls.h"
#include "cpp/support/ranks.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCounts = false;  // they have operators of their own
#else
constexpr bool kCounts = true;
#endif

namespace {
thread_local long allocations = 0;  // NOLINT: of this thread, for this test
}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace dreamcomm::testing {
namespace {

long allocations_of(Communicator& comm, const Request& request) {
  comm.run(request);  // the choice of an algorithm is cached from now on
  const long before = allocations;
  for (int i = 0; i < 100; ++i) comm.run(request);
  return allocations - before;
}

TEST_CASE("a call allocates nothing") {
  if (!kCounts) return;
  {
    delete new int(0);
  }
  REQUIRE(allocations > 0);
  const Setup setup{.size = 2, .heap_bytes = std::size_t{8} << 20};
  CHECK_NOTHROW(run_ranks(setup, [](Communicator& comm) {
    std::array<float, 16384> data{};
    const Block own{reinterpret_cast<std::byte*>(data.data()), sizeof data};
    const std::shared_ptr<std::byte> memory = own_heap()->allocate(sizeof data);
    const Block shared{memory.get(), sizeof data};
    for (const Block& block : {own, Block{own.data, 1024}, shared}) {
      Request request;
      request.kind = Kind::kAllReduce;
      request.reduction = {.dtype = DType::kFloat32, .op = ReduceOp::kMax};
      request.in = request.out = std::span(&block, 1);
      const long count = allocations_of(comm, request);
      require(count == 0, concat(count, " allocations in 100 calls of ", block.bytes, " bytes"));
    }
    require(allocations_of(comm, Request{}) == 0, "a barrier allocates");
  }));
}

}  // namespace
}  // namespace dreamcomm::testing

#include "cpp/support/host_driver.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <vector>

#include "core/error.h"
#include "cpp/support/host_kernel.h"

namespace dreamcomm::testing {
namespace {

/// State of all host drivers. Memory that is kept for ever stays reachable from here, also at exit,
/// so that the leak checker finds only unintended leaks.
struct Kept {
  std::mutex mutex;
  std::set<const void*> memory;
  std::set<const void*> drivers;
  std::atomic<int> calls_in_place{0};
  std::atomic<int> kernels_begun{0};
};
Kept& kept() {
  static auto* const all = new Kept;
  return *all;
}

void change(std::set<const void*>& set, const void* one, bool in) {
  const std::scoped_lock lock(kept().mutex);
  if (in) {
    set.insert(one);
  } else {
    set.erase(one);
  }
}

class HostDriver final : public gpu::Driver {
 public:
  HostDriver(int device, int room, Faults faults) : room_(room), faults_(faults) {
    device_[0] = static_cast<std::uint8_t>(device);
    change(kept().drivers, this, true);
  }
  ~HostDriver() override { change(kept().drivers, this, false); }

  gpu::Id process() const override { return {}; }
  gpu::Id device() const override { return device_; }
  std::string describe() const override { return concat("host:", int{device_[0]}); }
  int resident_blocks() const override { return room_; }

  std::byte* allocate(std::size_t bytes) override {
    check(faults_.allocates, ErrorKind::kSystem, "out of memory");
    auto* memory = static_cast<std::byte*>(::operator new(bytes, std::align_val_t{gpu::kSector}));
    std::memset(memory, 0, bytes);
    change(kept().memory, memory, true);
    return memory;
  }
  void release(std::byte* memory) noexcept override {
    change(kept().memory, memory, false);
    ::operator delete(memory, std::align_val_t{gpu::kSector});
  }
  gpu::MemoryName name_of(std::byte* memory) override {
    gpu::MemoryName name;
    name.address = reinterpret_cast<std::uint64_t>(memory);
    return name;
  }
  std::byte* open(const gpu::MemoryName& name) override {
    check(faults_.opens, ErrorKind::kSystem, "no peer access");
    if (faults_.reaches) return reinterpret_cast<std::byte*>(name.address);
    return elsewhere_.emplace_back(std::vector<std::byte>(1 << 20)).data();
  }
  void close(std::byte*) noexcept override {}
  std::byte* allocate_host(std::size_t bytes) override { return allocate(bytes); }
  void release_host(std::byte* memory) noexcept override { release(memory); }

  void* stream() const override { return nullptr; }
  // Copies one word at a time, as the bus does.
  void copy(void* to, const void* from, std::size_t bytes) override {
    check(bytes == sizeof(std::uint64_t), ErrorKind::kInvalid, "one word was expected");
    const auto word = std::atomic_ref(*static_cast<std::uint64_t*>(const_cast<void*>(from)));
    std::atomic_ref(*static_cast<std::uint64_t*>(to)).store(word.load());
  }
  void start(const gpu::KernelArgs& args, const gpu::Grid& grid, void*) override {
    if (args.in_place != 0) ++kept().calls_in_place;
    ++kept().kernels_begun;
    run_kernel(args, grid.blocks, grid.lanes, 50);
    if (!faults_.reads && args.info.kind == Kind::kAllGather) *args.out ^= std::byte{1};
  }
  void copy_later(void* to, const void* from, std::size_t bytes, void*) override {
    copy(to, from, bytes);
  }
  void drain() override {
    check(faults_.drains != 0, ErrorKind::kSystem, "the device is lost");
    if (faults_.drains > 0) --faults_.drains;
  }

 private:
  gpu::Id device_{};
  int room_;
  Faults faults_;
  std::vector<std::vector<std::byte>> elsewhere_;
};

}  // namespace

std::unique_ptr<gpu::Driver> make_host_driver(int device, int room, Faults faults) {
  return std::make_unique<HostDriver>(device, room, faults);
}

int host_calls_in_place() { return kept().calls_in_place; }

int host_kernels_begun() { return kept().kernels_begun; }

void await_host_kernel(int begun) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (host_kernels_begun() == begun && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
}

int host_memory_in_use() {
  const std::scoped_lock lock(kept().mutex);
  return static_cast<int>(kept().memory.size());
}

}  // namespace dreamcomm::testing

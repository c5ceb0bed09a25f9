#include "c10d/gradients/heap_births.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace dreamcomm {
namespace {

/// What this thread's backward pass wants; null outside of one.
std::shared_ptr<HeapBirths>& wanted_here() {
  thread_local std::shared_ptr<HeapBirths> births;
  return births;
}

/// All tensors that live in a heap by a birth, by their address: torch's raw interface frees memory
/// by its address alone. Never destroyed, as tensors may outlive it otherwise.
struct Living {
  std::mutex mutex;
  std::unordered_map<void*, Birth> births;
};

Living& living() {
  static Living* const only = new Living;
  return *only;
}

/// Stands in front of the CPU allocator that it finds. It outlives all tensors, whose storages
/// keep pointers to it.
class BirthAllocator final : public c10::Allocator {
 public:
  static void stand_in_front() {
    static const bool once = [] {
      behind() = c10::GetCPUAllocator();
      c10::SetCPUAllocator(new BirthAllocator);
      return true;
    }();
    static_cast<void>(once);
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (HeapBirths* const births = wanted_here().get()) {
      if (std::optional<Birth> birth = births->allocate(bytes)) return keep(std::move(*birth));
    }
    return behind()->allocate(bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return behind()->is_simple_data_ptr(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &end; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    behind()->copy_data(to, from, bytes);
  }

 private:
  static c10::Allocator*& behind() {
    static c10::Allocator* found = nullptr;
    return found;
  }

  static c10::DataPtr keep(Birth birth) {
    void* const data = birth.memory.get();
    const std::scoped_lock lock(living().mutex);
    living().births.emplace(data, std::move(birth));
    return {data, data, &end, c10::Device(c10::DeviceType::CPU)};
  }

  static void end(void* data) {
    {
      const std::scoped_lock lock(living().mutex);
      if (living().births.erase(data) > 0) return;
    }
    if (const c10::DeleterFnPtr passed_on = behind()->raw_deleter()) passed_on(data);
  }
};

}  // namespace

Birth::~Birth() {
  if (!memory) return;  // moved from
  memory.reset();
  size->live.fetch_sub(1);
}

HeapBirths::HeapBirths(std::shared_ptr<Heap> heap, const std::map<std::size_t, int>& wanted)
    : heap_(std::move(heap)) {
  for (const auto& [bytes, count] : wanted) sizes_[bytes].wanted = count;
}

std::optional<Birth> HeapBirths::allocate(std::size_t bytes) {
  const auto found = sizes_.find(bytes);
  if (found == sizes_.end()) return std::nullopt;
  BirthSize& size = found->second;
  if (size.live.fetch_add(1) >= size.wanted) {
    size.live.fetch_sub(1);
    return std::nullopt;
  }
  std::shared_ptr<std::byte> memory = heap_->allocate(bytes);
  if (!memory) {  // the heap is full
    size.live.fetch_sub(1);
    return std::nullopt;
  }
  return Birth(std::move(memory), shared_from_this(), &size);
}

void set_heap_births(std::shared_ptr<HeapBirths> births) {
  if (births) BirthAllocator::stand_in_front();
  wanted_here() = std::move(births);
}

}  // namespace dreamcomm

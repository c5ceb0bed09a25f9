#include "c10d/gradients/heap_births.h"

#include <c10/core/CPUAllocator.h>

#include <utility>

namespace dreamcomm {
namespace {

/// What this thread's backward pass wants; null outside of one.
std::shared_ptr<HeapBirths>& wanted_here() {
  thread_local std::shared_ptr<HeapBirths> births;
  return births;
}

/// Stands in front of the CPU allocator that it finds. It outlives all tensors, whose storages
/// keep pointers to it.
class BirthAllocator final : public c10::Allocator {
 public:
  explicit BirthAllocator(c10::Allocator* behind) : behind_(behind) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (HeapBirths* const births = wanted_here().get()) {
      if (c10::DataPtr born = births->allocate(bytes)) return born;
    }
    return behind_->allocate(bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return behind_->is_simple_data_ptr(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return behind_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    behind_->copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* const behind_;
};

void stand_in_front() {
  static const bool once = [] {
    c10::SetCPUAllocator(new BirthAllocator(c10::GetCPUAllocator()));
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace

struct HeapBirths::Birth {
  std::shared_ptr<std::byte> memory;
  std::shared_ptr<HeapBirths> births;  // keeps `size`
  Size* size;
};

HeapBirths::HeapBirths(std::shared_ptr<Heap> heap, const std::map<std::size_t, int>& wanted)
    : heap_(std::move(heap)) {
  for (const auto& [bytes, count] : wanted) sizes_[bytes].wanted = count;
}

c10::DataPtr HeapBirths::allocate(std::size_t bytes) {
  const auto found = sizes_.find(bytes);
  if (found == sizes_.end()) return {};
  Size& size = found->second;
  if (size.live.fetch_add(1) >= size.wanted) {
    size.live.fetch_sub(1);
    return {};
  }
  std::shared_ptr<std::byte> memory = heap_->allocate(bytes);
  if (!memory) {  // the heap is full
    size.live.fetch_sub(1);
    return {};
  }
  void* const data = memory.get();
  auto* const birth = new Birth{std::move(memory), shared_from_this(), &size};
  const c10::DeleterFnPtr end = [](void* held) {
    const std::unique_ptr<Birth> ended(static_cast<Birth*>(held));
    ended->memory.reset();
    ended->size->live.fetch_sub(1);
  };
  return {data, birth, end, c10::Device(c10::DeviceType::CPU)};
}

void set_heap_births(std::shared_ptr<HeapBirths> births) {
  if (births) stand_in_front();
  wanted_here() = std::move(births);
}

}  // namespace dreamcomm

#include "c10d/backward/wanted_tensors.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace dreamcomm {
namespace {

/// The tensors that this thread's backward pass wants; null outside of a pass.
std::shared_ptr<WantedTensors>& wanted_here() {
  thread_local std::shared_ptr<WantedTensors> wanted;
  return wanted;
}

/// All tensors that were placed in a heap, by their address: torch's raw interface frees memory
/// by its address alone. Never destroyed, as tensors may outlive it otherwise.
struct PlacedTensors {
  std::mutex mutex;
  std::unordered_map<void*, PlacedMemory> memory;
};

PlacedTensors& placed_tensors() {
  static PlacedTensors* const only = new PlacedTensors;
  return *only;
}

/// Stands in front of the CPU allocator that it finds. It outlives all tensors, whose storages
/// keep pointers to it.
class PlacingAllocator final : public c10::Allocator {
 public:
  static void stand_in_front() {
    static const bool once = [] {
      behind() = c10::GetCPUAllocator();
      c10::SetCPUAllocator(new PlacingAllocator);
      return true;
    }();
    static_cast<void>(once);
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (WantedTensors* const wanted = wanted_here().get()) {
      if (std::optional<PlacedMemory> memory = wanted->allocate(bytes))
        return keep(std::move(*memory));
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

  static c10::DataPtr keep(PlacedMemory memory) {
    void* const data = memory.memory.get();
    const std::scoped_lock lock(placed_tensors().mutex);
    placed_tensors().memory.emplace(data, std::move(memory));
    return {data, data, &end, c10::Device(c10::DeviceType::CPU)};
  }

  static void end(void* data) {
    {
      const std::scoped_lock lock(placed_tensors().mutex);
      if (placed_tensors().memory.erase(data) > 0) return;
    }
    if (const c10::DeleterFnPtr passed_on = behind()->raw_deleter()) passed_on(data);
  }
};

}  // namespace

PlacedMemory::~PlacedMemory() {
  if (!memory) return;  // moved from
  memory.reset();
  size->live.fetch_sub(1);
}

WantedTensors::WantedTensors(std::shared_ptr<Heap> heap, const std::map<std::size_t, int>& wanted)
    : heap_(std::move(heap)) {
  for (const auto& [bytes, count] : wanted) sizes_[bytes].wanted = count;
}

std::optional<PlacedMemory> WantedTensors::allocate(std::size_t bytes) {
  const auto found = sizes_.find(bytes);
  if (found == sizes_.end()) return std::nullopt;
  WantedSize& size = found->second;
  if (size.live.fetch_add(1) >= size.wanted) {
    size.live.fetch_sub(1);
    return std::nullopt;
  }
  std::shared_ptr<std::byte> memory = heap_->allocate(bytes);
  if (!memory) {  // the heap is full
    size.live.fetch_sub(1);
    return std::nullopt;
  }
  return PlacedMemory(std::move(memory), shared_from_this(), &size);
}

void place_new_tensors(std::shared_ptr<WantedTensors> wanted) {
  if (wanted) PlacingAllocator::stand_in_front();
  wanted_here() = std::move(wanted);
}

}  // namespace dreamcomm

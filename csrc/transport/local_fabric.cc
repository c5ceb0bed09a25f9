#include "transport/local_fabric.h"

#include <algorithm>
#include <new>
#include <utility>

#include "core/error.h"

namespace dreamcomm {
namespace {

constexpr std::align_val_t kAlignment{4096};

struct Free {
  void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
};
using Memory = std::unique_ptr<std::byte, Free>;
using Heaps = std::vector<std::shared_ptr<Heap>>;
using Windows = std::shared_ptr<const std::vector<Memory>>;

class LocalFabric final : public Fabric {
 public:
  LocalFabric(int rank, const WindowLayout& layout, Windows windows, Heaps heaps)
      : Fabric(rank, layout), windows_(std::move(windows)), heaps_(std::move(heaps)) {}

  std::byte* window(int rank) const override {
    return (*windows_)[static_cast<std::size_t>(rank)].get();
  }
  std::span<std::byte> heap(int rank) const override {
    if (heaps_.empty()) return {};
    const Heap& heap = *heaps_[static_cast<std::size_t>(rank)];
    return {heap.data(), heap.bytes()};
  }
  PeerState peer(int) const override { return PeerState::kAlive; }
  std::string describe() const override {
    return concat("local: ", size(), " ranks as threads of one process");
  }

 private:
  Windows windows_;
  Heaps heaps_;
};

}  // namespace

std::vector<std::unique_ptr<Fabric>> make_local(int size, const LocalOptions& options) {
  const WindowLayout layout(size, options.page_bytes, options.message_bytes);
  auto windows = std::make_shared<std::vector<Memory>>();
  for (int rank = 0; rank < size; ++rank) {
    auto* memory = static_cast<std::byte*>(::operator new(layout.bytes(), kAlignment));
    windows->emplace_back(memory);
    std::fill_n(memory, layout.bytes(), std::byte{0});
    layout.construct(memory, rank, options.start);
  }
  std::vector<std::unique_ptr<Fabric>> fabrics;
  for (int rank = 0; rank < size; ++rank) {
    fabrics.push_back(std::make_unique<LocalFabric>(rank, layout, windows, options.heaps));
  }
  return fabrics;
}

}  // namespace dreamcomm

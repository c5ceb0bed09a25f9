// Ranks as threads of one process: windows in plain memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/fabric.h"
#include "transport/shm/heap.h"

namespace dreamcomm {

struct LocalOptions {
  std::size_t page_bytes = std::size_t{512} << 10;
  std::size_t message_bytes = std::size_t{64} << 10;
  std::uint32_t start = 0;                   // first value of the round counters
  std::vector<std::shared_ptr<Heap>> heaps;  // one for each rank, or none
};

/// One fabric for each rank, over windows that live as long as any of them.
std::vector<std::unique_ptr<Fabric>> make_local(int size, const LocalOptions& options);

}  // namespace dreamcomm

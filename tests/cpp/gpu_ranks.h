// Ranks whose calls are carried out by the GPU's kernels, on the host target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "gpu/kernel.h"

namespace dreamcomm::testing {

/// A kernel's shape.
struct Grid {
  int blocks = 1;
  int lanes = 1;
};

/// The windows of a group of ranks, and what kernels and host tell each other.
class HostGpus {
 public:
  /// The rounds of all blocks begin after `start`.
  HostGpus(int size, std::size_t page_bytes, std::uint32_t start = 0);
  ~HostGpus();

  const gpu::Layout& layout() const { return layout_; }
  std::byte* window(int rank) const;
  std::uint64_t* rounds(int rank) { return rounds_[static_cast<std::size_t>(rank)].data(); }
  gpu::Control& control(int rank) { return controls_[static_cast<std::size_t>(rank)]; }
  gpu::Report& report(int rank) { return reports_[static_cast<std::size_t>(rank)]; }

 private:
  gpu::Layout layout_;
  std::vector<std::byte*> windows_;
  std::vector<std::vector<std::uint64_t>> rounds_;
  std::vector<gpu::Control> controls_;
  std::vector<gpu::Report> reports_;
};

/// Bytes of memory that a kernel moved.
struct Moved {
  std::size_t read = 0;
  std::size_t written = 0;
};

/// A call as the kernel gets it. Tensors in the ranks' heaps count as registered.
gpu::Task task_of(HostGpus& gpus, const Communicator& comm, const Request& request, gpu::RowId row,
                  Grid grid);

/// Runs the kernel of one rank, each lane a thread, and waits for it.
Moved run_kernel(const gpu::Task& task, Grid grid, int delays = 0);

/// Both. Throws if the kernel gave up.
Moved run_on(HostGpus& gpus, const Communicator& comm, const Request& request, gpu::RowId row,
             Grid grid, int delays = 0);

}  // namespace dreamcomm::testing

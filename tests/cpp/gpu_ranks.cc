#include "gpu_ranks.h"

#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "algorithms/signature.h"
#include "gpu/host_target.h"
#include "ranks.h"

namespace dreamcomm::testing {
namespace {

using gpu::RowId;

std::uint64_t place_in(const Communicator& comm, std::span<const Block> blocks) {
  const std::span<std::byte> heap = comm.heap(comm.rank());
  if (blocks.empty() || heap.empty() || blocks[0].data < heap.data()) return 0;
  if (blocks[0].data >= heap.data() + heap.size()) return 0;
  return static_cast<std::uint64_t>(blocks[0].data - heap.data()) + 1;
}

void run_lane(const gpu::Task& task, const gpu::HostTarget& target, int delays) {
  pause(delays);
  gpu::Block<gpu::HostTarget> block(target, task);
  if (task.card.op == ReduceOp::kNone) return gpu::move_body(block);
  const bool known = gpu::with_format(
      task.card.dtype, [&]<typename F>(std::type_identity<F>) { gpu::reduce_body<F>(block); });
  require(known, "GPUs do not compute with this type");
}

}  // namespace

HostGpus::HostGpus(int size, std::size_t page_bytes, std::uint32_t start)
    : controls_(static_cast<std::size_t>(size)), reports_(static_cast<std::size_t>(size)) {
  layout_.page_bytes = page_bytes;
  layout_.blocks = 8;
  for (int rank = 0; rank < size; ++rank) {
    auto* window =
        static_cast<std::byte*>(::operator new(layout_.bytes(), std::align_val_t{gpu::kSector}));
    std::memset(window, 0, layout_.bytes());
    windows_.push_back(window);
    rounds_.emplace_back(static_cast<std::size_t>(layout_.blocks), std::uint64_t{start});
    // As if the rounds before had been published.
    for (int block = 0; block < layout_.blocks; ++block) {
      for (int writer = 0; writer < size; ++writer) {
        auto* slot = reinterpret_cast<gpu::Slot*>(window + gpu::Layout::slot(block, writer));
        slot->published[0] = slot->published[1] = std::uint64_t{start} << 32U;
      }
    }
  }
}

HostGpus::~HostGpus() {
  for (std::byte* window : windows_) ::operator delete(window, std::align_val_t{gpu::kSector});
}

std::byte* HostGpus::window(int rank) const { return windows_[static_cast<std::size_t>(rank)]; }

gpu::Task task_of(HostGpus& gpus, const Communicator& comm, const Request& request, RowId row,
                  Grid grid) {
  gpu::Task task;
  const bool varies = request.kind == Kind::kAllToAll;
  task.bytes = varies || request.kind == Kind::kBarrier ? 0 : block_bytes(request);
  task.card = {.kind = request.kind,
               .op = request.reduction.op,
               .dtype = request.reduction.dtype,
               .row = static_cast<std::uint8_t>(row),
               .root = request.root,
               .blocks = static_cast<std::uint32_t>(grid.blocks),
               .bytes = task.bytes};
  task.rank = comm.rank();
  task.size = comm.size();
  task.divisor = request.reduction.divisor;
  if (!request.in.empty()) task.in = request.in[0].data;
  if (!request.out.empty()) task.out = request.out[0].data;
  for (int r = 0; r < comm.size(); ++r) {
    const auto index = static_cast<std::size_t>(r);
    if (varies) {
      task.in_bytes[r] = request.in[index].bytes;
      task.out_bytes[r] = request.out[index].bytes;
    }
    task.heaps[r] = comm.heap(r).data();
    task.windows[r] = gpus.window(r);
  }
  task.in_place = place_in(comm, request.in);
  task.out_place = place_in(comm, request.out);
  task.layout = gpus.layout();
  task.rounds = gpus.rounds(comm.rank());
  task.control = &gpus.control(comm.rank());
  task.report = &gpus.report(comm.rank());
  task.patience_ns = 60'000'000'000;
  return task;
}

Moved run_kernel(const gpu::Task& task, Grid grid, int delays) {
  std::vector<std::unique_ptr<gpu::HostBlock>> blocks;
  std::vector<std::thread> threads;
  for (int b = 0; b < grid.blocks; ++b) {
    gpu::HostBlock& shared = *blocks.emplace_back(std::make_unique<gpu::HostBlock>(grid.lanes));
    for (int lane = 0; lane < grid.lanes; ++lane) {
      threads.emplace_back([&task, &shared, lane, b, grid, delays] {
        run_lane(task, gpu::HostTarget(shared, lane, b, grid.blocks), delays);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  Moved moved;
  for (const auto& block : blocks) {
    moved.read += block->bytes_read();
    moved.written += block->bytes_written();
  }
  return moved;
}

Moved run_on(HostGpus& gpus, const Communicator& comm, const Request& request, RowId row, Grid grid,
             int delays) {
  const gpu::Task task = task_of(gpus, comm, request, row, grid);
  const Moved moved = run_kernel(task, grid, delays);
  require(task.report->claimed == 0,
          "the kernel gave up, reason " + std::to_string(task.report->reason));
  return moved;
}

}  // namespace dreamcomm::testing

// Kernels on threads of the process.
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "gpu/host_target.h"
#include "gpu_ranks.h"
#include "ranks.h"

namespace dreamcomm::testing {
namespace {

struct Free {
  void operator()(std::byte* memory) const {
    ::operator delete(memory, std::align_val_t{gpu::kSector});
  }
};

void run_lane(const gpu::Task& task, const gpu::HostTarget& target, int delays) {
  pause(delays);
  gpu::Block<gpu::HostTarget> block(target, task);
  if (task.card.op == ReduceOp::kNone) return gpu::move_body(block);
  const bool known = gpu::with_format(
      task.card.dtype, [&]<typename F>(std::type_identity<F>) { gpu::reduce_body<F>(block); });
  require(known, "GPUs do not compute with this type");
}

/// Each lane a thread; the bytes moved.
std::size_t run_kernel(const gpu::Task& task, const Way& way) {
  std::vector<std::unique_ptr<gpu::HostBlock>> blocks;
  std::vector<std::thread> threads;
  for (int b = 0; b < way.blocks; ++b) {
    gpu::HostBlock& shared = *blocks.emplace_back(std::make_unique<gpu::HostBlock>(way.lanes));
    for (int lane = 0; lane < way.lanes; ++lane) {
      threads.emplace_back([&task, &shared, &way, lane, b] {
        run_lane(task, gpu::HostTarget(shared, lane, b, way.blocks), way.delays);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::size_t moved = 0;
  for (const auto& block : blocks) moved += block->bytes_read() + block->bytes_written();
  return moved;
}

class HostGpus final : public Gpus {
 public:
  HostGpus(int size, std::size_t page_bytes, std::uint32_t start)
      : controls_(static_cast<std::size_t>(size)), reports_(static_cast<std::size_t>(size)) {
    layout_.page_bytes = page_bytes;
    layout_.blocks = 8;
    for (int rank = 0; rank < size; ++rank) {
      windows_.emplace_back(
          static_cast<std::byte*>(::operator new(layout_.bytes(), std::align_val_t{gpu::kSector})));
      gpu::prepare_window(windows_.back().get(), layout_, start);
      rounds_.emplace_back(static_cast<std::size_t>(layout_.blocks), std::uint64_t{start});
    }
  }

  Outcome run(const Communicator& comm, const Request& request, const Way& way) override {
    const auto self = static_cast<std::size_t>(comm.rank());
    gpu::Task task = task_of(comm, request, way);
    if (!request.in.empty()) task.in = request.in[0].data;
    if (!request.out.empty()) task.out = request.out[0].data;
    for (int r = 0; r < comm.size(); ++r) {
      task.heaps[r] = comm.heap(r).data();
      task.windows[r] = windows_[static_cast<std::size_t>(r)].get();
    }
    task.layout = layout_;
    task.card.page_bytes = static_cast<std::uint32_t>(layout_.page_bytes);
    task.rounds = rounds_[self].data();
    task.control = &controls_[self];
    task.report = &reports_[self];
    const std::size_t moved = run_kernel(task, way);
    return {reports_[self], moved};
  }

  void abort(int rank) override {
    gpu::HostBlock alone(1);
    gpu::HostTarget(alone, 0, 0, 1).publish(&controls_[static_cast<std::size_t>(rank)].abort, 1);
  }

 private:
  gpu::Layout layout_;
  std::vector<std::unique_ptr<std::byte, Free>> windows_;
  std::vector<std::vector<std::uint64_t>> rounds_;
  std::vector<gpu::Control> controls_;
  std::vector<gpu::Report> reports_;
};

}  // namespace

std::unique_ptr<Gpus> make_gpus(int size, std::size_t page_bytes, std::uint32_t start) {
  return std::make_unique<HostGpus>(size, page_bytes, start);
}

}  // namespace dreamcomm::testing
